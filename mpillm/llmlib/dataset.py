"""`LLMDataLoader`, the base class of data sets."""

from mpillm.data.data_loader import LLMDataLoader as LLMDataLoader
