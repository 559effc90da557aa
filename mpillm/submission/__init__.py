"""A submission to MLPerf Inference, made of run directories: the rules, the runs that fit together, the descriptions, the files."""
