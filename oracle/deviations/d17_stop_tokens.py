"""A stop string that the model spells in other tokens is cut from the text but does not stop."""
import http.client, json, pathlib, socket, subprocess, sys, tempfile, time
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

config = dict(model_type="llama", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
              num_attention_heads=1, rms_norm_eps=1e-5, vocab_size=8, tie_word_embeddings=False)
weights = dict(tree_flatten(Model(ModelArgs(**config)).parameters()))
weights["model.embed_tokens.weight"] = 99 * mx.eye(8)
weights["lm_head.weight"] = mx.eye(8, k=-1)  # each token is followed by the next one of VOCAB
VOCAB = {token: i for i, token in enumerate(["x", "E", "N", "D", "y", "$", "EN", "END"])}

with tempfile.TemporaryDirectory() as folder:
    mx.save_safetensors(f"{folder}/model.safetensors", weights)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=[("E", "N"), ("EN", "D")]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", folder, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):  # until it listens
                if not socket.socket().connect_ex(("127.0.0.1", port)): break
                time.sleep(0.1)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = json.dumps({"prompt": "x", "max_tokens": 4, "stop": ["END"]})
            connection.request("POST", "/v1/completions", body)
            answer = json.load(connection.getresponse())
            (choice,), usage = answer["choices"], answer["usage"]
            print("expected: text '', ended by stop after 3 tokens")  # E, N, D
            print(f"actual:   text {choice['text']!r}, ended by {choice['finish_reason']} "
                  f"after {usage['completion_tokens']} tokens")
        finally:
            server.kill()
