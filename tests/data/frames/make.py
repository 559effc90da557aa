"""Makes the data frames of this folder: ``python make.py`` once with each version of pandas that
test_preprocessed_frames.py names.

They are committed, so the tests need only one of these versions. What is in the frames is said again in the
tests.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
version = ".".join(pd.__version__.split(".")[:2])
if int(version.split(".")[0]) >= 3 and importlib.util.find_spec("pyarrow") is None:
    version += "-no-arrow"  # texts are then in an array of another class
frame = pd.DataFrame(
    {
        "id": ["flan.1", "niv.2", "t0.3"],
        "input": ["naïve", "long " * 200, ""],
        "tok_input": [[1, 300, 70000], list(range(2500)), [7]],
        "array": [np.array([4, 5]), np.array([6]), np.array([], np.int64)],
        "gt_output": ["14", 14, 2.5],
        "tok_input_length": [3, 2500, 1],
        "small": np.array([1, 2, 3], np.int16),
        "rate": [0.5, 1.0, 1.5],
    }
)
frame.to_pickle(HERE / f"pandas{version}.pkl")
frame.iloc[::-1].to_pickle(HERE / f"pandas{version}-reversed.pkl", protocol=2)
frame.astype({"id": "string", "input": "string"}).to_pickle(HERE / f"pandas{version}-string.pkl", protocol=4)
frame.iloc[[0, 2, 1]].to_pickle(HERE / f"pandas{version}-picked.pkl", protocol=3)
