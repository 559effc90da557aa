"""Makes the data frames of this folder, with pandas: ``python make.py`` once with each version of it that test_pickled_frames.py names.

They are committed, so the tests need no pandas; what is in them is said again in the tests.
"""

from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
version = ".".join(pd.__version__.split(".")[:2])
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
