"""Datasets of tasks: reading them, and which item comes next."""

from any_agent.data.batches import gives_columns as gives_columns
from any_agent.data.batches import items_of as items_of
from any_agent.data.cursor import DatasetCursor as DatasetCursor
from any_agent.data.cursor import ItemLoader as ItemLoader
from any_agent.data.dataset import get_custom_dataset as get_custom_dataset
from any_agent.data.rows import DataRow as DataRow
from any_agent.data.rows import MissingField as MissingField
from any_agent.data.rows import RowDataset as RowDataset
from any_agent.data.rows import RowSource as RowSource
from any_agent.data.rows import as_dataset as as_dataset
