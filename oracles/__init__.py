"""What is right: sequential decoders that share no code with the kernels."""
