"""The ``text`` of an answer: special tokens and the matched stop are cut as SGLang cuts them."""

from __future__ import annotations

from any_agent.engine.embedded.generate_schema import GenerateRequest
from any_agent.engine.embedded.request import EngineRequest, FinishReason
from any_agent.engine.embedded.stops import Decode, IncrementalDecoder, held_back


def final_text(
    call: GenerateRequest, request: EngineRequest, finish: FinishReason, decode: Decode
) -> str:
    """The whole text, without the stop string or stop token unless ``no_stop_trim``."""
    ids = request.output_ids
    if call.no_stop_trim or finish.type != "stop":
        return decode(ids)
    if isinstance(finish.matched, int):
        return decode(ids[:-1])
    return decode(ids).partition(finish.matched or "")[0] if finish.matched else decode(ids)


class StreamedText:
    """The text of a stream, so far: no half characters, nothing that a stop string may cut."""

    def __init__(self, call: GenerateRequest, request: EngineRequest, decode: Decode) -> None:
        self._call = call
        self._request = request
        self._decode = decode
        self._decoder = IncrementalDecoder(decode)
        self._stops = () if call.no_stop_trim else request.config.stop
        self._text = ""
        self._seen = 0

    def upto(self, count: int, finish: FinishReason | None) -> str:
        """The text of the first ``count`` tokens; with ``finish``, the final text."""
        if finish is not None:
            return final_text(self._call, self._request, finish, self._decode)
        for token in self._request.output_ids[self._seen : count]:
            self._text += self._decoder.push(token)
        self._seen = count
        kept = len(self._text) - held_back(self._text, self._stops)
        return self._text[:kept]
