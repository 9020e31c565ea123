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
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from any_agent.engine.embedded.adapter_files import AdapterFiles, layer_of, read_adapter
from any_agent.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from any_agent.engine.embedded.model_loader import LoadedModel

_ELSEWHERE = "leave out the adapters of this layer, or serve each merged, by its own service"
_Pair = tuple[Tensor, Tensor]
"""The matrices of one adapter at one layer, transposed and scaled: [in, rank] and [rank, out]."""
Matrices: TypeAlias = dict[str, _Pair]
"""The matrices of one adapter by the names of its layers."""


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
        self._ranks = [a.shape[1] for a, _ in pairs]
        self._chosen: tuple[_Tiles, Tensor, Tensor] | None = None

    def pair(self, index: int) -> _Pair:
        """Return views of the matrices of one adapter."""
        rank = self._ranks[index]
        return self._a[index, :, :rank], self._b[index, :rank]

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
    """The adapters of one engine. Once the engine runs, its thread alone calls :meth:`select`,
    :meth:`put`, :meth:`drop` and :meth:`matrices`."""

    def __init__(
        self, loaded: LoadedModel, folders: Mapping[str, str], *, live: bool = False
    ) -> None:
        """Read the adapters in ``folders``, by their names, and put them beside the model.

        ``live``: others will come. ConfigError for an adapter that does not fit the model.
        """
        self._device = loaded.device
        self._rows = 0
        self._groups: list[_Group] = []
        self._hooks: list[RemovableHandle] = []
        self._every: dict[str, Matrices] = {}
        """All adapters, by the keys that :meth:`select` gets: views of the layers' stacks."""
        self.identities: dict[str, str] = {}
        """Name and fingerprint of each fixed adapter, ``NAME@FINGERPRINT``, by the name."""
        modules = loaded.model.named_modules()
        self._linear = {name: m for name, m in modules if isinstance(m, nn.Linear)}
        self._odd: dict[str, str] = {}
        """The layers that cannot be adapted, each with the reason."""
        read = {name: read_adapter(name, folder) for name, folder in folders.items()}
        fitting = {name: self._fit(f"engine.adapters.{name}", each) for name, each in read.items()}
        layers = [*self._linear] if live else [k for each in fitting.values() for k in each]
        self._odd = _without_rows(loaded, {layer: self._linear[layer] for layer in layers})
        for name, matrices in fitting.items():
            self._require_rows("engine.adapters", matrices)
            self.identities[name] = f"{name}@{read[name].fingerprint}"
            self._every[self.identities[name]] = matrices
        self._arrange(self._every)

    def fit(self, what: str, files: AdapterFiles) -> Matrices:
        """Return an adapter's matrices for this model; ConfigError, which begins with ``what``, for
        one that does not fit. Any thread may call it."""
        matrices = self._fit(what, files)
        self._require_rows(what, matrices)
        return matrices

    def put(self, key: str, matrices: Matrices) -> None:
        """Add an adapter, or replace its matrices, between two steps."""
        old = self._every.get(key, {})
        if _shapes(old) == _shapes(matrices):
            for layer, pair in matrices.items():
                for mine, new in zip(old[layer], pair, strict=True):
                    mine.copy_(new)
        else:
            self._arrange(self._every | {key: matrices})

    def drop(self, key: str) -> None:
        """Remove an adapter, if it is there, between two steps."""
        if key in self._every:
            self._arrange({k: each for k, each in self._every.items() if k != key})

    def matrices(self, key: str) -> Matrices:
        """Return the matrices with which an adapter's rows are computed; {} if it is not there."""
        return dict(self._every.get(key, {}))

    def select(self, rows: Sequence[str | None]) -> None:
        """Choose the adapter of each row of the next forward passes, by its key; None: none."""
        self._rows = len(rows)
        for group in self._groups:
            indices = [None if row is None else group.index.get(row) for row in rows]
            group.tiles = _tiles(indices, len(group.index), self._device)
            for layer in group.layers:
                layer.forget()

    def _arrange(self, every: Mapping[str, Matrices]) -> None:
        """Stack the matrices of these adapters, layer by layer, in place of those before."""
        by_layer: dict[str, dict[str, _Pair]] = {}
        for key, matrices in every.items():
            for layer, pair in matrices.items():
                by_layer.setdefault(layer, {})[key] = pair
        groups: dict[tuple[str, ...], _Group] = {}
        views: dict[str, Matrices] = {key: {} for key in every}
        hooks = []
        for layer, pairs in by_layer.items():
            group = groups.setdefault(tuple(pairs), _Group(tuple(pairs)))
            stacked = _Layer(tuple(pairs.values()))
            group.layers.append(stacked)
            hooks.append((layer, partial(self._add, group, stacked)))
            for key, index in group.index.items():
                views[key][layer] = stacked.pair(index)
        for hook in self._hooks:
            hook.remove()
        self._groups, self._every = list(groups.values()), views
        self._hooks = [self._linear[k].register_forward_hook(hook) for k, hook in hooks]

    def _add(
        self, group: _Group, layer: _Layer, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> None:
        """Add the adapters' part to a linear layer's output, a fresh tensor, in place."""
        if group.tiles is not None:
            x = args[0]
            if x.ndim != 3 or len(x) != self._rows:
                raise RuntimeError(f"{len(x)} inputs of {x.ndim} dimensions for {self._rows} rows")
            layer.add(x, output, group.tiles)

    def _fit(self, what: str, files: AdapterFiles) -> Matrices:
        """Return an adapter's matrices in the model's type and on its device."""
        named = _tensors(what, files)
        if missing := sorted(named.keys() - self._linear.keys()):
            kinds = sorted({layer.rpartition(".")[2] for layer in self._linear})
            raise ConfigError(
                f"{what}: the model lacks {len(missing)} of the adapter's linear layers, among "
                f"them {missing[0][:200]!a}; it has {', '.join(kinds)}: give an adapter that was "
                "trained on this model"
            )
        rank = files.config.rank
        for layer, parts in named.items():
            weight = self._linear[layer].weight
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                found = tuple(parts[part].shape)
                if found != shape:
                    raise ConfigError(
                        f"{what}: lora_{part} of {layer} has the shape {list(found)}, and this "
                        f"model needs {list(shape)}: give an adapter that was trained on this model"
                    )
        out = {}
        for layer, parts in named.items():
            weight = self._linear[layer].weight
            a, b = out[layer] = _pair(parts, files.config.scaling, weight.dtype, weight.device)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ConfigError(f"{what}: {layer} has values that are not finite; train it again")
        return out

    def _require_rows(self, what: str, matrices: Matrices) -> None:
        """Raise ConfigError for a layer that cannot be adapted."""
        for layer in matrices:
            if layer in self._odd:
                raise ConfigError(f"{what}: {self._odd[layer]}; {_ELSEWHERE}")


def adapter_matrices(what: str, files: AdapterFiles, dtype: torch.dtype) -> Matrices:
    """Return an adapter's matrices as an engine of this type has them; ConfigError, which begins
    with ``what``, for a file that cannot be read."""
    cpu = torch.device("cpu")
    return {
        layer: _pair(parts, files.config.scaling, dtype, cpu)
        for layer, parts in _tensors(what, files).items()
    }


def named_matrices(matrices: Matrices) -> list[tuple[str, Tensor]]:
    """Return the matrices by the names under which an engine reports their checksums."""
    return [
        (f"{layer}.lora_{part}", matrix)
        for layer, pair in matrices.items()
        for part, matrix in zip("AB", pair, strict=True)
    ]


def _tensors(what: str, files: AdapterFiles) -> dict[str, dict[str, Tensor]]:
    """Return the file's tensors by the layer and by A and B."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(files.weights)
    except SafetensorError as error:
        raise ConfigError(f"{what}: its weights cannot be read: {error}") from error
    named: dict[str, dict[str, Tensor]] = {}
    for tensor, value in tensors.items():
        layer, part = layer_of(tensor)
        named.setdefault(layer, {})[part] = value
    return named


def _pair(
    parts: Mapping[str, Tensor], scaling: float, dtype: torch.dtype, device: torch.device
) -> _Pair:
    a, b = (parts[part].to(torch.float32) for part in ("A", "B"))
    return a.T.to(dtype=dtype, device=device), (b * scaling).T.to(dtype=dtype, device=device)


def _shapes(matrices: Matrices) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {layer: (a.shape, b.shape) for layer, (a, b) in matrices.items()}


def _without_rows(loaded: LoadedModel, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the layers to which a forward pass does not give the batch's rows, with the reason.

    The experts of a mixture, for example, get tokens of several rows together.
    """
    seen: set[str] = set()
    odd: dict[str, str] = {}
    rows, tokens = 2, 3
    model = type(loaded.model).__name__

    def note(layer: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.add(layer)
        if not args or args[0].ndim != 3 or len(args[0]) != rows:
            odd[layer] = (
                f"{model} does not give its layer {layer} one input for each row, so rows of "
                "several adapters cannot be told apart there"
            )

    hooks = [m.register_forward_pre_hook(partial(note, layer)) for layer, m in layers.items()]
    try:
        with torch.inference_mode():
            ids = torch.zeros((rows, tokens), dtype=torch.long, device=loaded.device)
            loaded.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers.keys() - seen:
        odd[layer] = (
            f"{model} does not call its layer {layer} as a module, so nothing can be added there"
        )
    return odd
