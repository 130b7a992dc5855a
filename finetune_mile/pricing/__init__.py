"""What a run would take here: images counted, steps timed, hours, disk and memory added up."""
