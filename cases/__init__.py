"""What is asked: cases, timelines, scenarios, inputs."""
