"""Training of a recipe's model in other forms than a run has: blocks eager, the whole model compiled and tuned, and one
pack's passes replayed as a CUDA graph. bench.scratch's parts `compile` and `graphs` are measured with it.

Each form is measured in a process of its own (`in_time`): one that fails may leave a device in any state, and a
compiler that takes too long can only be ended.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import nothing, scratch_runs
from bench.output import device, failure
from bench.scratch_runs import Work, begin
from bench.timing import median_ms
from tuningfork.data.packing.loader import build_packs
from tuningfork.records import PackedBatch, map_tensors
from tuningfork.train.batch import StepBatch

PACKAGE = Path(__file__).parents[1] / "tuningfork"
TUNED = "max-autotune-no-cudagraphs"
FORMS = ("eager", "ours", TUNED)
CAPTURE_WARM_UP = 3


def in_time(seconds: float, measure: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What `measure(*given)` returns, from a process of its own; of one that fails, or has not returned after so many
    seconds and is ended, a `note` that says so."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, measure, given))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return {"note": f"ended after {seconds:,.0f} s, with no result"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        process.join()
        return {"note": f"its process ended with {process.exitcode} and no result"}
    finally:
        process.kill()
        process.join()


def _answer(to: Connection, measure: Callable[..., dict[str, Any]], given: tuple[Any, ...]) -> None:
    try:
        found = measure(*given)
    except Exception as error:  # whatever a form cannot do is a result
        traceback.print_exc()
        found = {"note": f"{refusing(error)}: {failure(error)}"}
    to.send(found)


def refusing(error: BaseException) -> str:
    """The innermost line of ours that an error went through, such as ``models/policy.py:147 hidden_rows``, with the
    innermost of all where that is another."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    places = [
        f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno} {frame.name}" for frame in own[-1:]
    ] + [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-1:] if frame not in own[-1:]]
    return " in ".join(reversed(places))


def rate(name: str, form: str, tokens: int, length: int, steps: int) -> dict[str, Any]:
    """Tokens/s of whole training steps in a form of FORMS, see `tokens_per_second`; how long the first step took, and
    how much was compiled or tuned in all of them."""
    work = begin(name, tokens, length)
    in_form(work, form)
    made = list(work.steps(length, steps))
    found: dict[str, Any] = {"note": "", "first_step_s": round(made[0].seconds, 1)}
    found["compilations"] = sum(step.compilations for step in made)
    return found | scratch_runs.tokens_per_second(iter(made))


def in_form(work: Work, form: str) -> None:
    """Run the model eagerly, as a run has it, or with its backbone compiled as a whole for one size of pack. The head
    is ours in all of them."""
    if form == "ours":
        return
    policy = work.session.policy
    policy.compiled = False
    policy.keep_activations("none")  # blocks are their classes' own again
    if form != "eager":
        policy.model.base_model.compile(mode=form, dynamic=False)


class Pass:
    """The forward and backward pass of one pack on a device, again and again: what a CUDA graph can hold."""

    def __init__(self, work: Work, pack: PackedBatch) -> None:
        self.work, self.pack = work, map_tensors(pack, lambda tensor: tensor.to(device(), copy=True))
        objective = work.session.objective
        batch = StepBatch.of([pack], objective, None)
        self.loss = objective.of_chunks(batch.own.to(device()), batch.totals.to(device()))

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Loss and log-probs; gradients are those of this pack alone."""
        self.work.model.zero_grad(set_to_none=True)
        session = self.work.session
        return session.scorer.backward(self.pack, self.loss, linear=session.objective.linear)

    def load(self, pack: PackedBatch) -> None:
        """Put another pack of the same sizes in the place of this one."""
        here, there = _tensors(self.pack), _tensors(pack)
        if [tensor.shape for tensor in here] != [tensor.shape for tensor in there]:
            raise ValueError("packs differ in their sizes, so that one graph is not for both")
        for own, other in zip(here, there, strict=True):
            own.copy_(other)

    def numbers(self, found: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Copies of loss, log-probs and all gradients, by name."""
        weights = self.work.model.named_parameters()
        gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
        named = {"loss": found[0], "log-probs": found[1], **gradients}
        return {name: tensor.detach().clone() for name, tensor in named.items()}


def changed(again: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """What has other bits, and by how much: norm of the difference / norm."""
    assert again.keys() == truth.keys()
    return {
        name: float((again[name] - one).float().norm() / one.float().norm())
        for name, one in truth.items()
        if not torch.equal(again[name], one)
    }


def _tensors(pack: PackedBatch) -> list[Tensor]:
    found: list[Tensor] = []

    def kept(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(pack, kept)
    return found


def graph(name: str, tokens: int, length: int, repeats: int) -> dict[str, Any]:
    """One pack's forward and backward pass with and without a CUDA graph.

    host_reads         where the pass waits for the device, which no graph can hold; empty where nowhere
    plain_tokens_s     tokens / the median time of the pass as a run has it
    graph_tokens_s     of its replay
    equal              whether a replay's loss, log-probs and gradients have the bits of the pass, for the pack that was
                       captured and for another one that was put in its place
    changed            what has other bits of the captured one, then of the other, and by how much: norm / norm
    unrepeated         what has other bits when the pass runs again without a graph; empty where it is deterministic
    note               which line refuses to be captured; empty where none does
    """
    work = begin(name, tokens, length)
    packs = [build_packs(nothing.documents(tokens // length, length, work.vocabulary, seed), work.limits)[0]
             for seed in (0, 1)]  # fmt: skip
    once, where = Pass(work, packs[0]), device()
    line: dict[str, Any] = {"note": "", "rows": len(packs[0].input_ids), "documents": len(packs[0].examples)}
    stream = torch.cuda.Stream()  # one for all passes: gradients are added up on the stream of the first
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(CAPTURE_WARM_UP):
            once()
        truths: list[dict[str, Tensor]] = []
        unrepeated: dict[str, float] = {}
        for pack in reversed(packs):  # the first is in place again behind them
            once.load(pack)
            truths.append(once.numbers(once()))
            unrepeated |= changed(once.numbers(once()), truths[-1])
        truths.reverse()
        line["unrepeated"] = unrepeated
        line["plain_tokens_s"] = _rate(tokens, median_ms(once, where, repeats))
        line["host_reads"] = host_reads(once)
        captured = torch.cuda.CUDAGraph()
        once.work.model.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(captured, stream=stream):
                found = once()
        except Exception as error:
            traceback.print_exc()
            cause: BaseException = error  # the first: to end a capture that failed fails, too
            while cause.__context__ is not None:
                cause = cause.__context__
            return line | {"note": f"not captured, {refusing(cause)}: {failure(cause)}"}
        line["changed"] = []
        for pack, truth in zip(packs, truths, strict=True):
            once.load(pack)
            captured.replay()
            line["changed"].append(changed(once.numbers(found), truth))
        line["graph_tokens_s"] = _rate(tokens, median_ms(captured.replay, where, repeats))
        return line | {"equal": not any(line["changed"])}


def host_reads(run: Callable[[], object]) -> str:
    """The first line at which `run` makes the host wait for the device; empty where it makes it nowhere."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except Exception as error:
        return f"{refusing(error)}: {failure(error)}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def _rate(tokens: int, milliseconds: float) -> float:
    return round(1e3 * tokens / milliseconds, 1)
