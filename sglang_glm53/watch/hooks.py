"""Where the watchdog looks: after a pass of the target, and where SGLang reads a pass's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog, support
from sglang_glm53.watch import options, probe
from sglang_glm53.watch.alarms import NOT_FINITE, Book
from sglang_glm53.watch.request import Alarm, Watched

_DECODED = (
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._normalize_decode_outputs"
)
_PREFILLED = (
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor.process_batch_result_prefill"
)
_STATE = "_glm53_watched"
_NO_FINITE = Alarm(NOT_FINITE, "NaN or infinity in the target's logits")

_book: Book | None = None


def install() -> None:
    """Set the changes (rows of the catalog); none with GLM53_WATCH=off.

    Raises:
        Glm53Error: GLM53_WATCH says nothing that is known.
    """
    global _book
    asked = options.from_environment()
    if asked.off:
        return
    _book = Book(asked)
    catalog.wrap("sglang.srt.model_executor.model_runner:ModelRunner.forward", _pass(_book))
    catalog.wrap(_DECODED, _decoded(_book))
    catalog.wrap(_PREFILLED, _prefilled(_book))
    if asked.probe:
        catalog.wrap("sglang.srt.entrypoints.http_server:_wait_and_warmup", probe.before_ready)


def block() -> dict[str, int] | None:
    """The alarms of this process by kind, for its state; None where nothing is watched."""
    return None if _book is None else _book.block()


def _pass(book: Book) -> Callable[..., Any]:
    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not support.is_ours(self.model_config.hf_config):
                return original(self, forward_batch, *args, **kwargs)
            if book.options.debug:
                return _checked(book, original, self, forward_batch, *args, **kwargs)
            output = original(self, forward_batch, *args, **kwargs)
            if not self.is_draft_worker:
                from sglang_glm53.watch.logits import keep_sums

                keep_sums(output.logits_output)
            return output

        return forward

    return factory


def _checked(
    book: Book, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A pass in debug mode."""
    from sglang_glm53.watch import slots
    from sglang_glm53.watch.logits import keep_sums

    rids = list(batch.rids or ())
    problem = slots.check_before(runner, batch) if rids else None
    marked, drafts = None, False
    if problem is None and rids and batch.out_cache_loc is not None:
        # Steps of a draft that reuse its selection write no index keys: the pass after verification
        # writes those of the accepted tokens, before they are read.
        drafts = runner.is_draft_worker and batch.forward_mode.is_decode()
        marked = slots.mark(runner.token_to_kv_pool, batch.out_cache_loc, index_keys=not drafts)
    output = original(runner, batch, *args, **kwargs)
    if not runner.is_draft_worker:
        keep_sums(output.logits_output)
    if marked is not None:
        problem = slots.check_after(runner.token_to_kv_pool, marked, index_keys=not drafts)
    if problem is not None:
        who = "the draft's " if runner.is_draft_worker else "the target's "
        book.waiting.extend((rid, Alarm(problem.kind, who + problem.says)) for rid in rids)
    return output


def _decoded(book: Book) -> Callable[..., Any]:
    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        def _normalize_decode_outputs(
            self: Any, *, batch: Any, result: Any, logits_output: Any, next_token_ids: Any
        ) -> Any:
            tokens, logprobs = original(
                self,
                batch=batch,
                result=result,
                logits_output=logits_output,
                next_token_ids=next_token_ids,
            )
            if support.is_ours(self.model_config.hf_config):
                width = result.speculative_output_stride or result.speculative_num_draft_tokens
                speculates = not batch.spec_algorithm.is_none()
                _judge(book, self, batch.reqs, logits_output, tokens, width if speculates else 1)
            return tokens, logprobs

        return _normalize_decode_outputs

    return factory


def _judge(
    book: Book, processor: Any, requests: list[Any], logits_output: Any, tokens: Any, width: int
) -> None:
    """Judge a decode step: the tokens of each request, of `width` rows of logits each."""
    from sglang_glm53.watch.logits import bad_requests

    _count_in(book, processor)
    # Not strict, as SGLang is: rows behind the requests' are padding, and no end of the scheduler.
    for request, new in zip(requests, tokens, strict=False):
        if request.finished() or request.is_retracted or request.beam_group is not None:
            continue
        watched = request.__dict__.get(_STATE)
        if watched is None:
            watched = Watched(book.options, request.origin_input_ids, request.output_ids)
            setattr(request, _STATE, watched)
        watched.output = request.output_ids
        alarm = None
        if width > 1:
            alarm = watched.speculated(new, width - 1, judge=request.grammar is None)
        alarm = alarm or watched.repeated()
        if alarm is not None:
            book.raise_alarm(alarm, request, tells=_tells(), may_abort=True)
    _raise_bad_logits(book, requests, bad_requests(logits_output, width, len(requests)))
    if book.waiting:
        book.deliver(requests, tells=_tells(any_stage=True), may_abort=_one_stage())


def _prefilled(book: Book) -> Callable[..., Any]:
    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_batch_result_prefill(self: Any, batch: Any, result: Any) -> Any:
            if self.is_generation and support.is_ours(self.model_config.hf_config):
                from sglang_glm53.watch.logits import bad_requests

                _count_in(book, self)
                bad = bad_requests(result.logits_output, 1, len(batch.reqs))
                _raise_bad_logits(book, batch.reqs, bad)
                if book.waiting:
                    tells = _tells(any_stage=True)
                    book.deliver(batch.reqs, tells=tells, may_abort=_one_stage())
            return original(self, batch, result)

        return process_batch_result_prefill

    return factory


def _raise_bad_logits(book: Book, requests: list[Any], bad: list[int]) -> None:
    for index in bad:
        request = requests[index]
        if not request.finished() and not request.is_retracted:
            tells = _tells(any_stage=True)
            book.raise_alarm(_NO_FINITE, request, tells=tells, may_abort=_one_stage())


def _count_in(book: Book, processor: Any) -> None:
    if processor.metrics_reporter.current_scheduler_metrics_enabled:
        book.count_in(processor.metrics_collector)


def _tells(*, any_stage: bool = False) -> bool:
    """Whether this rank speaks for those that hold the same tokens.

    Args:
        any_stage: what is told is seen by one pipeline stage alone.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and (any_stage or parallel.pp_rank == 0)


def _one_stage() -> bool:
    """Whether all ranks that schedule a request see its logits: else its end would part them."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().pp_size == 1
