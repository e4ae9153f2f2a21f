"""What a recipe names -> the tables that it stands for."""
