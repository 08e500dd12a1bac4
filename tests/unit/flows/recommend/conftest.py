import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a model with weights, small enough to be trained on a CPU: a Llama of two layers."""
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
