"""What happens beside the steps of a run, one file each."""
