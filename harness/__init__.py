"""Who asks and judges: paths, traces, verdicts, records, campaigns."""
