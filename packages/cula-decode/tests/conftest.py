"""What a decode call has to do, in float64 and one number after the other; shares no code with it.

Per token and value head, with S the state as V x K rows: S <- S e^g, S <- S + beta (v - S k) k^T,
o = scale S q; Lightning has S <- e^g S + v k^T instead.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import cula.decode
from cula.common.testing import assert_close, rel_error, same_bits
from cula.decode.cases import Case, make_inputs

O_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
STATE_TOLERANCE = 1e-5  # float32, a step
ROUNDING_FACTOR = 1.5  # of the error of rounding the exact state to bfloat16


def _sequences(x: dict) -> list[tuple[int, range]]:
    """Per sequence its batch row and tokens; bounds out of range are clamped."""
    B, T = x["v"].shape[:2]
    if x.get("cu_seqlens") is None:
        return [(n, range(T)) for n in range(B)]
    bounds = x["cu_seqlens"].tolist()
    found = []
    for start, end in pairwise(bounds):
        start = min(max(start, 0), T)
        found.append((0, range(start, min(max(end, start), T))))
    return found


def _log_decay(x: dict, hv: int, g: torch.Tensor) -> torch.Tensor:
    """Of one value head, [.., K]."""
    if not x.get("use_gate_in_kernel"):
        return g
    K, bias, lower = g.shape[-1], x.get("dt_bias"), x.get("lower_bound")
    if bias is not None:
        g = g + (bias[hv] if bias.dim() == 2 else bias[hv * K : (hv + 1) * K]).double()
    rate = 1.0 if x.get("A_log") is None else x["A_log"][hv].double().exp()
    if lower is None:
        return -rate * (g.clamp(min=0) + torch.log1p((-g.abs()).exp()))
    return lower / (1 + (-rate * g).exp())


def _first_slot(x: dict, n: int, slots: int) -> int:
    indices = x.get("state_indices")
    if indices is None:
        return n
    if indices.dim() == 1:
        slot = int(indices[n])
    else:
        accepted = x.get("num_accepted_tokens")
        column = 0 if accepted is None else int(accepted[n]) - 1
        slot = int(indices[n, column]) if 0 <= column < indices.shape[1] else -1
    return slot if 0 <= slot < slots else -1


def expected(x: dict) -> SimpleNamespace:
    """The results of a decode call with the keywords `x`, all of them given, on the CPU.

    o, and `owners`: how many sequences have a token; the pool, and `touched`: its slots that may
    change; tokens: the states after every token (nan: not written).
    """
    q, k, v = (x[name].double() for name in ("q", "k", "v"))
    B, T, HV, V = v.shape
    K, group = q.shape[3], HV // q.shape[2]
    scale = x.get("scale")
    scale = K**-0.5 if scale is None else scale
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    kda, before = "beta" in x, x["state"].double()
    pool, touched = before.clone(), set()
    o, owners = torch.zeros(B, T, HV, V).double(), torch.zeros(B, T, dtype=torch.int32)
    tokens = torch.full((B, T, HV, V, K), torch.nan).double()
    finals = []
    for n, (b, steps) in enumerate(_sequences(x)):
        slot = _first_slot(x, n, before.shape[0])
        for t in steps:
            owners[b, t] += 1
        finals.append(torch.zeros(HV, V, K).double())
        if slot < 0:
            continue
        for hv in range(HV):
            S = before[slot, hv].clone()
            for i, t in enumerate(steps):
                qt, kt, vt = q[b, t, hv // group], k[b, t, hv // group], v[b, t, hv]
                if kda:
                    S = S * _log_decay(x, hv, x["g"][b, t, hv].double()).exp()
                    beta = x["beta"][b, t, hv].double()
                    if x.get("use_beta_sigmoid_in_kernel"):
                        beta = (2 if x.get("allow_neg_eigval") else 1) / (1 + (-beta).exp())
                    S = S + torch.outer(beta * (vt - S @ kt), kt)
                else:
                    S = x["g_gamma"][hv].double().exp() * S + torch.outer(vt, kt)
                o[b, t, hv] = scale * (S @ qt)
                tokens[b, t, hv] = S
                indices = x.get("state_indices")
                if indices is not None and indices.dim() == 2 and i < indices.shape[1]:
                    target = int(indices[n, i])
                    if x.get("update_state", True) and 0 <= target < before.shape[0]:
                        pool[target, hv] = S
                        touched.add(target)
            finals[n][hv] = S
            indices = x.get("state_indices")
            if x.get("update_state", True) and (indices is None or indices.dim() == 1):
                pool[slot, hv] = S
                touched.add(slot)
    return SimpleNamespace(
        o=o, owners=owners, pool=pool, touched=sorted(touched), tokens=tokens, finals=finals
    )


def check_state(name: str, x: torch.Tensor, exact: torch.Tensor, steps: int) -> None:
    """A state of float32, or one of bfloat16 against rounding the exact one."""
    if x.dtype == torch.bfloat16:
        assert_close(name, x, exact, ROUNDING_FACTOR * rel_error(exact.bfloat16(), exact) + 1e-9)
    else:
        assert_close(name, x, exact, STATE_TOLERANCE * max(steps, 1))


def check_decode(call: str, given: dict, o_tolerance: float | None = None, **more) -> torch.Tensor:
    """Run a decode call on `given` (and `more`, its backend say) and hold it to `expected`."""
    before = {n: y.detach().cpu().clone() if torch.is_tensor(y) else y for n, y in given.items()}
    want = expected(before)
    v = given["v"]
    out = torch.full(v.shape, torch.nan, dtype=v.dtype, device=v.device)
    result = getattr(cula.decode, call)(**given, out=out, **more)
    assert result is out
    o, state = out.cpu(), given["state"].cpu()
    tolerance = o_tolerance or O_TOLERANCE[v.dtype]
    owned = want.owners > 0
    assert_close("o", o[owned], want.o[owned], tolerance)
    steps = max((len(tokens) for _, tokens in _sequences(before)), default=0)
    if want.touched:
        check_state("state", state[want.touched], want.pool[want.touched], steps)
    others = sorted(set(range(state.shape[0])) - set(want.touched))
    assert same_bits(state[others], before["state"][others]), "a slot not named has changed"
    if given.get("token_states") is not None:
        has = ~want.tokens.flatten(2).isnan().any(-1)
        kept = given["token_states"].cpu()
        check_state("token states", kept[has], want.tokens[has], steps)
        assert same_bits(kept[~has], before["token_states"][~has])
    return out


def check_recurrent(given: dict, o_tolerance: float | None = None, **more) -> torch.Tensor:
    """The same for `fused_recurrent_kda`."""
    x = {n: y.detach().cpu().clone() if torch.is_tensor(y) else y for n, y in given.items()}
    sequences = _sequences(x)
    v_first = x.get("state_v_first", False)
    initial = x.get("initial_state")
    if initial is None:
        shape = (len(sequences), x["v"].shape[2], x["v"].shape[3], x["q"].shape[3])
        x["state"] = torch.zeros(shape)
    else:
        x["state"] = initial if v_first else initial.mT
    want = expected({**x, "update_state": True})
    o, final = cula.decode.fused_recurrent_kda(**given, **more)
    assert o.dtype == given["v"].dtype and o.device == given["v"].device
    assert_close("o", o.cpu(), want.o, o_tolerance or O_TOLERANCE[o.dtype])
    if initial is not None:
        assert same_bits(given["initial_state"].cpu(), initial), "the initial state was written"
    if not x.get("output_final_state", False):
        assert final is None
        return o
    assert final.dtype == torch.float32
    exact = torch.stack(want.finals) if want.finals else x["state"].double()
    steps = max((len(tokens) for _, tokens in sequences), default=0)
    check_state("final state", final.cpu(), exact if v_first else exact.mT, steps)
    return o


def check_case(case: Case, device: str = "cpu", seed: int = 0, **more) -> torch.Tensor:
    """Run a case and hold it to the float64 result."""
    given = make_inputs(case, device, seed)
    if case.call == "fused_recurrent_kda":
        return check_recurrent(given, **more)
    return check_decode(case.call, given, **more)


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    return SimpleNamespace(
        expected=expected, case=check_case, decode=check_decode, recurrent=check_recurrent
    )
