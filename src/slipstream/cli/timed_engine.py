"""The engine in this process, timed: answers a batch of prompts, to a fixed length, and says what that cost. For benchmarks.

Time waiting for the GIL, in three parts:

    host, working    between two waits for results the scheduler thread runs or stands still: wall time less its CPU time
    host, waking     a result is handed over, and the scheduler thread is not there yet: until the return of `result`
    device thread    within a step, wall time less the thread's CPU time

At lag 0 no other thread runs Python while one of the two works, so what these show there is the machine's own noise (and,
within a step, operators that wait for other cores). The difference between lag 1 and lag 0 is the GIL, and a core where torch's
threads fill them all: `--num-threads` one below the number of cores leaves the GIL alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.config import EngineConfig
from slipstream.engine.build import assemble_engine
from slipstream.engine.executor import Device, StepHandle, ThreadExecutor
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.seeds import seed_i
from slipstream.text.detokenize import StopScanner
from slipstream.types import EngineRequest, SamplingParams, nothing
from slipstream.weights.loaded import LoadedModel

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch. Seconds; `cpu_s` is of the whole process. From `num_steps` on 0 where a system has no such thing.

    `host_s`: planning and settling. `wait_s`: waiting for results, of which `host_wake_s` after the result was handed over.
    `device_s`: in steps. `host_off_cpu_s`, `device_off_cpu_s`: what the two threads stood still for, see above.
    `num_drafted`, `num_accepted`: draft nodes verified, and those of them that became part of an answer.
    """

    wall_s: float
    cpu_s: float
    num_tokens: int
    num_steps: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0
    device_s: float = 0.0
    host_off_cpu_s: float = 0.0
    host_wake_s: float = 0.0
    device_off_cpu_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0


class System(Protocol):
    """Something that answers prompts."""

    name: str

    def run(self, prompts: Sequence[Ids], output_len: int) -> tuple[Sample, list[Ids]]:
        """Answer all prompts at once with `output_len` tokens each; returns what it cost and the answers."""
        ...


class _TimedDevice:
    """A device that adds up its thread's off-CPU time, and notes when results are handed over and what steps took."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.off_cpu_s = 0.0
        self.handed_over_s = 0.0  # when a result was, last: where the step behind it begins to compute, or a step ends
        self.step_s: defaultdict[int, list[float]] = defaultdict(list)

    def run(self, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        def noted() -> None:
            self.handed_over_s = time.perf_counter()
            computes()

        wall, cpu = time.perf_counter(), time.thread_time()
        result = self._device.run(plan, noted)
        self.handed_over_s = time.perf_counter()
        self.off_cpu_s += self.handed_over_s - wall - (time.thread_time() - cpu)
        if plan.rows and not plan.chunks:
            drafting_s = sum(result.propose_s.values()) + sum(result.observe_s.values())
            self.step_s[plan.num_tokens].append(result.device_s - drafting_s)
        return result

    def close(self) -> None:
        self._device.close()


class _TimedHandle:
    """A step whose waiter's waking is timed."""

    def __init__(self, handle: StepHandle, executor: _TimedExecutor) -> None:
        self._handle = handle
        self._executor = executor

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> StepResult:
        called = time.perf_counter()
        result = self._handle.result()
        self._executor.wake_s += time.perf_counter() - max(called, self._executor.device.handed_over_s)
        return result


class _TimedExecutor:
    """The engine's own executor, timed."""

    def __init__(self, device: Device) -> None:
        self.device = _TimedDevice(device)
        self.wake_s = 0.0
        self._inner = ThreadExecutor(self.device)

    def submit(self, plan: StepPlan) -> StepHandle:
        return _TimedHandle(self._inner.submit(plan), self)

    def close(self) -> None:
        self._inner.close()


class TimedEngine:
    """The engine, in this process, around a model that several of them may share. Each run has seeds of its own."""

    def __init__(self, name: str, loaded: LoadedModel, config: EngineConfig, temperature: float = 0.0) -> None:
        self.name = name
        self._temperature = temperature
        self._executors: list[_TimedExecutor] = []
        self._num_runs = 0

        def executor(device: Device) -> _TimedExecutor:
            self._executors.append(_TimedExecutor(device))
            return self._executors[-1]

        self._engine = assemble_engine(
            loaded.model,
            config,
            eos_token_ids=loaded.eos_token_ids,
            stop_text=lambda request: StopScanner(loaded.tokenizer, request.params),
            context_len=loaded.context_len,
            tokenizer=loaded.tokenizer,
            executor=executor,
        )

    @property
    def step_s(self) -> Mapping[int, Sequence[float]]:
        """Seconds of the device's steps so far, by how many tokens they computed; without prompts, and without drafting."""
        (executor,) = self._executors
        return executor.device.step_s

    def run(self, prompts: Sequence[Ids], output_len: int) -> tuple[Sample, list[Ids]]:
        """Answer all prompts at once; see `System`."""
        engine, (executor,) = self._engine, self._executors
        params = SamplingParams(temperature=self._temperature, max_tokens=output_len, ignore_eos=True)
        answers: dict[str, Ids] = {f"{self._num_runs}-{index}": [] for index in range(len(prompts))}
        self._num_runs += 1
        stats = engine.stats()
        before = (stats.num_steps, stats.host_s, stats.wait_s, stats.device_s)
        drafts = stats.num_drafted, stats.num_accepted
        off_cpu, wake, cpu = executor.device.off_cpu_s, executor.wake_s, time.process_time()
        wall, thread_cpu = time.perf_counter(), time.thread_time()
        for index, (request_id, ids) in enumerate(zip(answers, prompts, strict=True)):
            engine.add(EngineRequest(request_id, tuple(ids), params, seed=seed_i(self._num_runs, index)))
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(f"a request must be answered, but got {output.error}")
                answers[output.request_id].extend(output.token_ids)
        wall_s, thread_s = time.perf_counter() - wall, time.thread_time() - thread_cpu
        stats = engine.stats()
        num_steps, host_s, wait_s, device_s = (
            after - earlier
            for after, earlier in zip((stats.num_steps, stats.host_s, stats.wait_s, stats.device_s), before, strict=True)
        )
        sample = Sample(
            wall_s=wall_s,
            cpu_s=time.process_time() - cpu,
            num_tokens=sum(map(len, answers.values())),
            num_steps=int(num_steps),
            host_s=host_s,
            wait_s=wait_s,
            device_s=device_s,
            host_off_cpu_s=wall_s - thread_s - wait_s,
            host_wake_s=executor.wake_s - wake,
            device_off_cpu_s=executor.device.off_cpu_s - off_cpu,
            num_drafted=stats.num_drafted - drafts[0],
            num_accepted=stats.num_accepted - drafts[1],
        )
        return sample, list(answers.values())

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()
