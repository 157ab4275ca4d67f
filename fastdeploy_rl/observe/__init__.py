"""What is told to people about engines and machines: reports rendered, machines examined."""
