"""One family of the demo: prefill, generate, check, time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from demo.clock import Clock, Times
from demo.layers import ToyModel

TOLERANCE = 0.005  # bf16 outputs and the state, relative RMS
BACKENDS = ("cute", "fla", "reference")  # best first


@dataclass
class Step:
    """One line of the demo's table.

    Attributes:
        call: what ran.
        backend: which implementation of it.
        tokens: how many tokens of each prompt it took at a time.
        error: RMS(x - ref) / RMS(ref) against the float64 recurrence over the whole sequence.
        times: of one call.
    """

    call: str
    backend: str
    tokens: int
    error: float
    times: Times


@dataclass
class Told:
    """What became of one family.

    Attributes:
        steps: prefill and decode.
        state_error: of the final state, against the same recurrence.
        tokens: what was generated after the first prompt.
    """

    steps: list[Step]
    state_error: float
    tokens: list[int]

    def worst(self) -> float:
        """The largest error; nan if there is any."""
        errors = [step.error for step in self.steps] + [self.state_error]
        return max(errors, key=lambda x: (x != x, x))


def best_backend(call: Callable[[str], object]) -> str:
    """The best implementation that can run a call here.

    Args:
        call: makes the call with the backend named.

    Returns:
        Its name.
    """
    for backend in BACKENDS[:-1]:
        try:
            call(backend)
        except NotImplementedError:  # said by cula: no such implementation for this machine
            continue
        return backend
    return BACKENDS[-1]


def run_family(model: ToyModel, clock: Clock, say: Callable[[str], None]) -> Told:
    """Prefill the prompts, generate token by token, check against the whole sequence, time.

    Args:
        model: the family's toy model.
        clock: times the calls.
        say: shows progress.

    Returns:
        What became of it.
    """
    from cula.common.testing import rel_error

    sizes = model.sizes
    state = model.new_state()

    say(f"prefill of {sizes.prompt} tokens")
    seen = [model.inputs(model.prompts())]
    o = torch.empty_like(seen[0][2])
    prompt = seen[0]
    prefill_backend = best_backend(lambda name: model.prefill(prompt, state.clone(), o, name))
    outputs = [model.prefill(prompt, state, o, prefill_backend).clone()]
    after_prompt = state.clone()

    tokens = [model.next_tokens(o)]
    o = torch.empty_like(o[:, :1])
    step = model.inputs(tokens[-1])
    decode_backend = best_backend(lambda name: model.decode(step, state.clone(), o, name))
    for i in range(sizes.new):
        if i % 16 == 0:
            say(f"generate token {i + 1} of {sizes.new}")
        seen.append(model.inputs(tokens[-1]))
        outputs.append(model.decode(seen[-1], state, o, decode_backend).clone())
        tokens.append(model.next_tokens(o))

    say(f"check against the float64 recurrence over {sizes.prompt + sizes.new} tokens")
    exact_o, exact_state = model.exact([torch.cat(parts, 1) for parts in zip(*seen, strict=True)])
    generated = torch.cat(outputs[1:], 1)
    prefill_error = rel_error(outputs[0], exact_o[:, : sizes.prompt])
    decode_error = rel_error(generated, exact_o[:, sizes.prompt :])

    say("time both calls")
    prefill = clock.prefill(model, prefill_backend, prompt)
    decode = clock.decode(model, decode_backend, seen[1], after_prompt)
    return Told(
        [
            Step(model.prefill_call, prefill_backend, sizes.prompt, prefill_error, prefill),
            Step(model.decode_call, decode_backend, 1, decode_error, decode),
        ],
        rel_error(state, exact_state),
        torch.cat(tokens[:-1], 1)[0].tolist(),
    )
