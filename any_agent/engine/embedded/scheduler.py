"""The continuous-batching loop: one thread that steps all running requests together.

Requests join and leave between any two steps. Other threads change the loop's state only by posting
functions to its inbox, so that no state is shared.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from any_agent.engine.embedded.adapters import Adapters
from any_agent.engine.embedded.inbox import Inbox, fail, fulfil
from any_agent.engine.embedded.kv_cache import KVCache
from any_agent.engine.embedded.prompts import KnownPrompts
from any_agent.engine.embedded.request import EngineRequest, Event, FinishReason, similar_lengths
from any_agent.engine.embedded.sampler import BatchSampler, SampleDraw
from any_agent.engine.embedded.variant import PauseMode, Variant
from any_agent.errors import Conflict, EngineUnavailable

logger = logging.getLogger(__name__)
_MAX_PREFILL_TOKENS = 8192  # prompt tokens that may join in one step; a longer one joins alone


class Scheduler:
    """Owns the model between :meth:`start` and :meth:`stop`.

    ``deliver`` is called in the loop's thread, at most once per step, with the new events.
    ``max_total_tokens`` bounds rows x longest possible row, in tokens of key/value states.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        deliver: Callable[[list[Event]], None],
        *,
        max_running: int,
        max_total_tokens: int | None,
        version: str,
        threads: int | None = None,
        seed: int | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._cache = cache
        self._deliver = deliver
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._threads = threads
        self._generator = torch.Generator(device=cache.device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self.base = Variant(version)
        """The model itself."""
        self.error: BaseException | None = None
        self.steps = 0
        self._variants = deque([self.base])  # the one whose turn it is to join comes first
        self._joining: list[EngineRequest] = []  # in a prefill: neither waiting nor running
        self._running: list[EngineRequest] = []
        self._prompts = KnownPrompts(cache)
        self._sampler: BatchSampler | None = None
        self._events: list[Event] = []
        self._inbox = Inbox()
        self.call = self._inbox.call
        self._stopping = False  # True: the thread must end
        self._thread = threading.Thread(target=self._run, name="generation-loop", daemon=True)

    # -- methods for other threads ---------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and abort the running requests; return when the thread has ended."""

        def stop() -> None:
            self._stopping = True

        with contextlib.suppress(EngineUnavailable):
            self._inbox.post(stop, lambda _: None)
        self.join()

    def join(self) -> None:
        """Return when the thread has ended."""
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._inbox.closed

    @property
    def load(self) -> tuple[int, int]:
        """The current numbers of running and waiting requests."""
        return len(self._running), sum(len(each.waiting) for each in tuple(self._variants))

    def load_of(self, variant: Variant) -> tuple[int, int]:
        """Return the same numbers of one variant."""
        return self._count(variant), len(variant.waiting)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; raise EngineUnavailable if the loop has ended."""

        def refuse(error: Exception) -> None:
            request.finish = FinishReason.failure(EngineUnavailable(str(error)))
            self._report_end(request)

        def queue() -> None:
            if request.variant in self._variants:
                request.variant.waiting.append(request)
            else:
                refuse(EngineUnavailable(f"the adapter {request.variant.adapter} was removed"))

        self._inbox.post(queue, refuse)

    def abort(self, variant: Variant, rid: str | None, message: str) -> Future[None]:
        """End one request of a variant, or all of them (None), with their output so far."""
        return self.call(lambda: self._abort(variant, rid, FinishReason("abort", message=message)))

    def pause(self, variant: Variant, mode: PauseMode) -> Future[None]:
        """Stop stepping a variant. ``abort`` ends its requests first.

        ``in_place`` keeps them; for the model itself only, and it stops all others with it.
        """

        def pause() -> None:
            variant.paused = mode
            if mode == "abort":
                self._abort(variant, None, FinishReason("abort", message="generation was paused"))

        return self.call(pause)

    def resume(self, variant: Variant, version: str | None = None) -> Future[None]:
        """Continue stepping; ``version``, if given, renames the weights from here on."""

        def resume() -> None:
            variant.paused = None
            variant.version = variant.version if version is None else version

        return self.call(resume)

    def clear_cache(self, variant: Variant) -> Future[bool]:
        """Free the key/value states of known prompts; False if requests still need them."""

        def clear() -> bool:
            if self._count(variant):
                return False
            self._prompts.clear(variant.adapter)
            if not self._running:
                self._cache.clear()
            return True

        return self.call(clear)

    def update(
        self, variant: Variant, apply: Callable[[], None], version: str | None
    ) -> Future[int]:
        """Apply new weights: at once when paused, else when no request of the variant runs (none is
        admitted). A variant that is not there joins the others.

        The future has the number of requests that were kept paused; cancelling it while it waits
        abandons the update.
        """
        future: Future[int] = Future()

        def swap() -> int:
            self._prompts.clear(variant.adapter)
            apply()
            self._sampler = None  # the rows' adapters are chosen anew
            if version is not None:
                variant.version = version
            return self._count(variant)

        def enqueue() -> None:
            if variant.update is not None and not variant.update[1].cancelled():
                fail(future, Conflict("another weight update is waiting; send one at a time"))
                return
            variant.update = (swap, future)
            if variant not in self._variants:
                self._variants.append(variant)

        self._inbox.post(enqueue, lambda error: fail(future, error))
        return future

    def remove(self, variant: Variant, release: Callable[[], None]) -> Future[None]:
        """End a variant's requests, call ``release``, and refuse further ones."""

        def remove() -> None:
            self._abort(variant, None, FinishReason("abort", message="the adapter was removed"))
            self._prompts.clear(variant.adapter)
            if variant in self._variants:
                self._variants.remove(variant)
            if variant.update is not None:
                fail(variant.update[1], Conflict("the adapter was removed meanwhile"))
                variant.update = None
            release()
            self._sampler = None

        return self.call(remove)

    # -- methods of the loop's thread ------------------------------------------------------------
    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._receive()
                    self._maybe_update()
                    if self.base.paused != "in_place" and not self._stopping:
                        self._step()
                    self._flush()
        except BaseException as exc:
            logger.exception("the generation loop died")
            self.error = exc
        finally:
            self._end()

    def _receive(self) -> None:
        """Run the posted functions; wait for one if there is nothing to step."""
        joins = any(each.admits for each in self._variants)
        steps = self.base.paused != "in_place" and (self._running or joins)
        idle = not steps and not any(each.update for each in self._variants)
        while True:
            run = self._inbox.take(wait=idle)
            if run is None:
                return
            run()
            if self._events:
                return
            idle = False

    def _maybe_update(self) -> None:
        for variant in self._variants:
            if variant.update is None or (variant.paused is None and self._count(variant)):
                continue
            (swap, future), variant.update = variant.update, None
            fulfil(future, swap)

    def _step(self) -> None:
        """Prefill the requests that can join, then sample one token for every running request."""
        self._joining = self._admissible()
        for group in similar_lengths(self._joining, _MAX_PREFILL_TOKENS):
            self._prefill(group)
            self._flush()  # the first token need not wait for the second
        self._joining = []
        if self._running:
            self._decode()

    def _admissible(self) -> list[EngineRequest]:
        """Take the requests that fit, the variants by turns, and each one's in order, so that none
        starves."""
        taken: list[EngineRequest] = []
        reach = max((r.reach for r in self._running), default=0)
        tokens = 0
        while len(self._running) + len(taken) < self._max_running:
            variant = self._next()
            if variant is None:
                break
            head: EngineRequest = variant.waiting[0]
            tokens += len(head.input_ids)
            if taken and tokens > _MAX_PREFILL_TOKENS:
                break  # running requests get a token before more join
            reach = max(reach, head.reach)
            rows = len(self._running) + len(taken) + 1
            limit = self._max_total_tokens
            if limit is not None and rows > 1 and rows * reach > limit:
                break
            taken.append(variant.waiting.popleft())
            self._variants.rotate(-1)
        return taken

    def _next(self) -> Variant | None:
        """Return the variant whose turn it is, as the first one; None if no request may join."""
        for _ in range(len(self._variants)):
            if self._variants[0].admits:
                return self._variants[0]
            self._variants.rotate(-1)
        return None

    def _count(self, variant: Variant) -> int:
        """Return the number of a variant's running requests."""
        return sum(request.variant is variant for request in self._running)

    def _prefill(self, group: list[EngineRequest]) -> None:
        """Give each request a row with its prompt's states, and sample its first token."""
        prompts = self._prompts
        fresh = prompts.unknown(group)
        if fresh:
            for request, logits in zip(fresh, self._compute(fresh), strict=True):
                prompts.add(request, logits)
        self._running.extend(fresh)
        for request in group:
            if request not in fresh:
                prompts.copy(request, self._running)
                self._running.append(request)
        joined = self._running[-len(group) :]
        sampler = self._sampler_of(joined)
        self._sampler = None
        logits = torch.stack([prompts.logits_of(request) for request in joined])
        self._accept(joined, self._draw(sampler, logits, joined))

    def _compute(self, group: list[EngineRequest]) -> Tensor:
        """Fill new rows by a forward pass; return their last logits, [rows, vocabulary]."""
        self._select(group)
        lengths = [len(r.input_ids) for r in group]
        longest, device = max(lengths), self._cache.device
        ids = torch.tensor([r.input_ids + [0] * (longest - len(r.input_ids)) for r in group])
        last = torch.tensor(sorted({n - 1 for n in lengths}))
        # Padding is on the right, where the causal mask hides it from every real token.
        self._cache.begin_prefill(lengths)
        logits = self._forward(
            ids.to(device),
            torch.arange(longest, device=device).expand_as(ids),
            None,
            last.to(device),
        )
        self._cache.end_prefill(lengths)
        which = torch.searchsorted(last, torch.tensor(lengths) - 1).to(device)
        return logits[torch.arange(len(group), device=device), which]

    def _decode(self) -> None:
        cache, running = self._cache, self._running
        if self._sampler is None:
            self._sampler = self._sampler_of(running)
            self._select(running)
        ids = torch.tensor([[r.output_ids[-1]] for r in running], device=cache.device)
        positions = cache.length_index[:, None]
        logits = self._forward(ids, positions, cache.begin_decode(), 1)[:, -1]
        cache.end_decode()
        self._accept(running, self._draw(self._sampler, logits, running))

    def _select(self, rows: list[EngineRequest]) -> None:
        """Let the next forward passes add each row's adapter."""
        if self._adapters is not None:
            self._adapters.select([r.adapter_key for r in rows])

    def _sampler_of(self, rows: list[EngineRequest]) -> BatchSampler:
        return BatchSampler(
            [r.config for r in rows],
            self._cache.device,
            [r.processor for r in rows],
            [r.top for r in rows],
        )

    def _draw(self, sampler: BatchSampler, logits: Tensor, rows: list[EngineRequest]) -> SampleDraw:
        positions = [r.position for r in rows] if sampler.seeded else []
        return sampler.sample(logits, self._generator, positions)

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int
    ) -> Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache.kv,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits

    def _accept(self, rows: list[EngineRequest], draw: SampleDraw) -> None:
        self.steps += 1
        finished, tops = False, draw.tops
        for row, request in enumerate(rows):
            token, logprob = draw.ids[row], draw.logprobs[row]
            if request.top:
                request.accept(token, logprob, tops[row])
            else:
                request.accept(token, logprob)
            if request.finish is not None:
                finished = True
            elif request.stream:
                self._events.append((request, len(request.output_ids), None))
        if finished:
            self._reap()

    def _reap(self) -> None:
        for row in range(len(self._running) - 1, -1, -1):
            request = self._running[row]
            if request.finish is None:
                continue
            self._prompts.release(request, row)
            self._cache.drop(row, wipe=request.finish.error is not None)
            self._running[row] = self._running[-1]
            self._running.pop()
            self._report_end(request)
        self._sampler = None

    def _report_end(self, request: EngineRequest) -> None:
        self._events.append((request, len(request.output_ids), request.finish))

    def _abort(self, variant: Variant, rid: str | None, finish: FinishReason) -> None:
        waiting, variant.waiting = variant.waiting, deque()
        for request in waiting:
            if rid is None or request.rid == rid:
                request.finish = finish
                self._report_end(request)
            else:
                variant.waiting.append(request)
        for request in self._running:
            if request.variant is variant and (rid is None or request.rid == rid):
                request.finish = finish
        self._reap()

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _end(self) -> None:
        """Fail all that is posted, queued or running, so that no caller waits for ever."""
        reason = f"the generation loop died: {self.error!r}" if self.error else "the engine stopped"
        error = EngineUnavailable(reason)
        self._inbox.close(error)
        for variant in self._variants:
            if variant.update is not None:
                fail(variant.update[1], error)
        waiting = [request for variant in self._variants for request in variant.waiting]
        for request in (*self._running, *self._joining, *waiting):
            if request.finish is None:
                request.finish = FinishReason.failure(EngineUnavailable(reason))
                self._report_end(request)
        self._running.clear()
        for variant in self._variants:
            variant.waiting.clear()
        self._flush()
