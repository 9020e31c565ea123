"""LoRA adapters beside one model: rows of different adapters, and of none, in one forward pass.

A linear layer computes ``W x`` once for all rows. A hook then adds ``s B A x`` to the rows of each
adapter that has the layer: the rows are cut into tiles of one adapter each, and all tiles are two
batched products. The model's modules, names and weights stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from any_agent.engine.embedded.adapter_files import AdapterFiles, layer_of, read_adapter
from any_agent.errors import ConfigError

if TYPE_CHECKING:
    from any_agent.engine.embedded.model_loader import LoadedModel

_ELSEWHERE = "leave out the adapters of this layer, or serve each merged, by its own service"
_Pair = tuple[Tensor, Tensor]
"""The matrices of one adapter at one layer, transposed and scaled: [in, rank] and [rank, out]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """The rows of a batch that adapters change, in tiles of equal height and one adapter each.

    There are fewer than two tiles for each adapter of the batch, so that padding is bounded however
    unequal the numbers of rows are.
    """

    adapters: Tensor | None
    """The adapter of each tile, as an index into the layers' stacks; None: the stacks as they
    are."""
    count: int
    rows: Tensor | None
    """The row at each place of each tile; None: the batch's rows in order."""
    filled: Tensor | None
    """The places that are no padding; None: all."""
    changed: Tensor | None
    """The rows at those places."""


def _tiles(adapters: Sequence[int | None], known: int, device: torch.device) -> _Tiles | None:
    """Cut the rows of a batch into tiles; None if no row has an adapter."""
    counts = Counter(index for index in adapters if index is not None)
    if not counts:
        return None
    height = -(-counts.total() // len(counts))
    of_tiles: list[int] = []
    rows: list[int] = []
    filled: list[int] = []
    for adapter in sorted(counts):
        own = [row for row, index in enumerate(adapters) if index == adapter]
        for start in range(0, len(own), height):
            tile = own[start : start + height]
            filled += range(len(rows), len(rows) + len(tile))
            rows += tile + tile[:1] * (height - len(tile))
            of_tiles.append(adapter)
    in_order = rows == list(range(len(adapters)))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return _Tiles(
        adapters=None if of_tiles == list(range(known)) else tensor(of_tiles),
        count=len(of_tiles),
        rows=None if in_order else tensor(rows),
        filled=None if len(filled) == len(rows) else tensor(filled),
        changed=None if in_order else tensor([rows[place] for place in filled]),
    )


class _Layer:
    """The matrices of all adapters of one layer, padded with zeros to the highest rank."""

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        rank = max(a.shape[1] for a, _ in pairs)
        a, b = pairs[0]
        self._a = a.new_zeros(len(pairs), a.shape[0], rank)
        self._b = b.new_zeros(len(pairs), rank, b.shape[1])
        for index, (a, b) in enumerate(pairs):
            self._a[index, :, : a.shape[1]] = a
            self._b[index, : b.shape[0]] = b
        self._chosen: tuple[_Tiles, Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Free the copies that the last batch needed."""
        self._chosen = None

    def add(self, x: Tensor, output: Tensor, tiles: _Tiles) -> None:
        """Add to ``output`` [rows, tokens, out] what the adapters make of ``x`` [rows, tokens, in],
        in place."""
        tokens = x.shape[1]
        a, b = self._matrices(tiles)
        x = (x if tiles.rows is None else x[tiles.rows]).reshape(tiles.count, -1, x.shape[2])
        more = torch.bmm(torch.bmm(x, a), b).reshape(-1, tokens, output.shape[2])
        if tiles.filled is not None:
            more = more[tiles.filled]
        if tiles.changed is None:
            output.add_(more)
        else:
            output.index_add_(0, tiles.changed, more)

    def _matrices(self, tiles: _Tiles) -> _Pair:
        if tiles.adapters is None:
            return self._a, self._b
        if self._chosen is None or self._chosen[0] is not tiles:
            self._chosen = (tiles, self._a[tiles.adapters], self._b[tiles.adapters])
        return self._chosen[1:]


class _Group:
    """The layers that the same adapters have, so that their tiles are the same, too."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self.index = {adapter: k for k, adapter in enumerate(adapters)}
        self.layers: list[_Layer] = []
        self.tiles: _Tiles | None = None


class Adapters:
    """The adapters of one engine, whose thread alone calls :meth:`select` once the engine runs."""

    def __init__(self, loaded: LoadedModel, folders: Mapping[str, str]) -> None:
        """Read the adapters in ``folders``, by their names, and put them beside the model.

        ConfigError for an adapter that does not fit the model.
        """
        self._device = loaded.device
        self._rows = 0
        self._groups: list[_Group] = []
        self.identities: dict[str, str] = {}
        """Name and fingerprint, ``NAME@FINGERPRINT``, by the name."""
        linear = {n: m for n, m in loaded.model.named_modules() if isinstance(m, nn.Linear)}
        every: dict[str, dict[str, _Pair]] = {}
        for name, folder in folders.items():
            files = read_adapter(name, folder)
            identity = self.identities[name] = f"{name}@{files.fingerprint}"
            for layer, pair in _pairs(name, files, linear).items():
                every.setdefault(layer, {})[identity] = pair
        groups: dict[tuple[str, ...], _Group] = {}
        for layer, pairs in every.items():
            group = groups.setdefault(tuple(pairs), _Group(tuple(pairs)))
            group.layers.append(_Layer(tuple(pairs.values())))
            hook = partial(self._add, group, group.layers[-1])
            linear[layer].register_forward_hook(hook)
        self._groups = list(groups.values())
        _require_rows(loaded, {layer: linear[layer] for layer in every})

    def select(self, rows: Sequence[str | None]) -> None:
        """Choose the adapter of each row of the next forward passes, by identity; None: none."""
        self._rows = len(rows)
        for group in self._groups:
            indices = [None if row is None else group.index.get(row) for row in rows]
            group.tiles = _tiles(indices, len(group.index), self._device)
            for layer in group.layers:
                layer.forget()

    def _add(
        self, group: _Group, layer: _Layer, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> None:
        """Add the adapters' part to a linear layer's output, a fresh tensor, in place."""
        if group.tiles is not None:
            x = args[0]
            if x.ndim != 3 or len(x) != self._rows:
                raise RuntimeError(f"{len(x)} inputs of {x.ndim} dimensions for {self._rows} rows")
            layer.add(x, output, group.tiles)


def _pairs(name: str, files: AdapterFiles, linear: Mapping[str, nn.Linear]) -> dict[str, _Pair]:
    """Return an adapter's matrices by layer, in the model's type and on its device."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    what = f"engine.adapters.{name}"
    try:
        tensors = load(files.weights)
    except SafetensorError as error:
        raise ConfigError(f"{what}: its weights cannot be read: {error}") from error
    named: dict[str, dict[str, Tensor]] = {}
    for tensor, value in tensors.items():
        layer, part = layer_of(tensor)
        named.setdefault(layer, {})[part] = value
    if missing := sorted(named.keys() - linear.keys()):
        kinds = sorted({layer.rpartition(".")[2] for layer in linear})
        raise ConfigError(
            f"{what}: the model lacks {len(missing)} of the adapter's linear layers, among them "
            f"{missing[0][:200]!a}; it has {', '.join(kinds)}: give an adapter that was trained on "
            "this model"
        )
    out = {}
    rank = files.config.rank
    for layer, parts in named.items():
        weight = linear[layer].weight
        wanted = {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}
        for part, shape in wanted.items():
            found = tuple(parts[part].shape)
            if found != shape:
                raise ConfigError(
                    f"{what}: lora_{part} of {layer} has the shape {list(found)}, and this model "
                    f"needs {list(shape)}: give an adapter that was trained on this model"
                )
        a, b = (parts[part].to(torch.float32) for part in ("A", "B"))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ConfigError(f"{what}: {layer} has values that are not finite; train it again")
        b = b * files.config.scaling
        out[layer] = (a.T.to(weight), b.T.to(weight))
    return out


def _require_rows(loaded: LoadedModel, layers: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError unless a forward pass gives each adapted layer the batch's rows.

    The experts of a mixture, for example, get tokens of several rows together.
    """
    seen: set[str] = set()
    rows, tokens = 2, 3

    def note(layer: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or args[0].ndim != 3 or len(args[0]) != rows:
            raise ConfigError(
                f"engine.adapters: {type(loaded.model).__name__} does not give its layer {layer} "
                f"one input for each row, so rows of several adapters cannot be told apart there; "
                f"{_ELSEWHERE}"
            )
        seen.add(layer)

    hooks = [m.register_forward_pre_hook(partial(note, layer)) for layer, m in layers.items()]
    try:
        with torch.inference_mode():
            ids = torch.zeros((rows, tokens), dtype=torch.long, device=loaded.device)
            loaded.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if left := sorted(layers.keys() - seen):
        raise ConfigError(
            f"engine.adapters: {type(loaded.model).__name__} does not call its layer {left[0]} as "
            f"a module, so nothing can be added there; {_ELSEWHERE}"
        )
