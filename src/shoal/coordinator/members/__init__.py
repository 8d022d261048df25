"""The members of a run: sessions and seats, joining and leaving, authentication."""
