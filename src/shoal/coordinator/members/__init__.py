"""Who takes part: sessions and seats, joining and leaving, authentication."""
