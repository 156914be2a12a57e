"""PipelinedLLEP; import its files by name (`budget` and `schedule` are free of torch)."""
