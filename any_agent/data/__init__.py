"""Datasets of tasks: reading them, and which item comes next."""

from any_agent.data.batches import gives_columns, items_of
from any_agent.data.cursor import DatasetCursor, ItemLoader
from any_agent.data.dataset import get_custom_dataset
from any_agent.data.rows import DataRow, MissingField, RowDataset, as_dataset

__all__ = [
    "DataRow",
    "DatasetCursor",
    "ItemLoader",
    "MissingField",
    "RowDataset",
    "as_dataset",
    "get_custom_dataset",
    "gives_columns",
    "items_of",
]
