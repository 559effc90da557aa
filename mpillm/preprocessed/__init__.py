"""The data sets that MLCommons and NVIDIA publish, tokenized beforehand."""

from mpillm.preprocessed.loader import Columns as Columns
from mpillm.preprocessed.loader import LLMDataLoader as LLMDataLoader
