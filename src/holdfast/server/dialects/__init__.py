"""Request fields of every dialect, as tables over one declaration of sampling and one of turn options."""
