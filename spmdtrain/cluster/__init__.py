"""The processes of a job before JAX starts: TF_CONFIG, rendezvous, authentication."""
