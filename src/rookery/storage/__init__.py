"""What must survive: the database, the artifacts, the locked data folder."""
