"""The embedded engine: an inference server without SGLang, for CPUs, tests and small GPUs.

``python -m any_agent.engine.embedded --model-path DIR`` speaks SGLang's native HTTP contract, so
that one client drives both. In one process,
:class:`any_agent.engine.embedded.engine.EmbeddedEngine` is the same engine without HTTP.

Life of a request: ``generate_schema`` checks the body -> ``engine`` admits it (duplicate ids,
bounded queue) -> ``scheduler`` prefills it into a row of ``kv_cache`` and steps all rows together,
``sampler`` changes the logits of the rows that need it and draws, ``stops`` finds the end -> one
hand-over per step to asyncio -> ``server`` writes JSON or events.

Design points:

- One thread runs the model; every change of its state is a function in its inbox, run between two
  steps. So cancelling takes one step, and a weight update falls exactly between two tokens.
- Key/value states lie in slots: one row per request, each with its own length. A request joins by
  being prefilled into a free row and leaves by the last row moving into its place; a step writes
  one column per row and copies nothing else.
- A prompt that was computed is not computed again: its states are copied, from a running request,
  or from some 2,000 tokens that are kept of prompts without one. An update of the weights forgets
  all of them, so nothing computed under old weights is ever served to a new request.
- LoRA adapters lie beside the model, and rows of different ones share a batch: a linear layer
  computes its product once, and ``adapters`` adds each adapter's part to its rows. A prompt's
  states are one adapter's. Without adapters nothing of this is there.
- Live adapters come and change while the engine serves (``live_adapters``): each is a variant of
  the model, with its own version, gate, queue and updates, and a whole engine to its run.
- A seeded request draws its tokens by its seed and their positions alone, so that neither its
  neighbours nor an interruption change them; with one request at a time, two processes agree bit
  for bit.
- Penalties, biases and grammars live in an object of the request that has them; a row without one
  costs nothing. A row with one gives the log-probabilities of the changed distribution, as SGLang.
- Weights are read from safetensors only, checked completely, and replaced between two steps.
"""
