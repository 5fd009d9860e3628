"""replay-parity: differential correctness harness for recurrent-state decode (Gated DeltaNet, Mamba2)."""
