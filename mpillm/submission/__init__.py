"""A submission to MLPerf Inference, made from run directories: rules, scores, compliance, files."""
