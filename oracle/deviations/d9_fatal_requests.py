"""Any of these requests kills the generation thread of mlx_lm.server: the next one is refused."""
import http.client, json, pathlib, socket, subprocess, sys, tempfile, time
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
config = dict(model_type="llama", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
              num_attention_heads=1, rms_norm_eps=1e-5, vocab_size=8, tie_word_embeddings=False)
weights = dict(tree_flatten(Model(ModelArgs(**config)).parameters()))
weights["model.embed_tokens.weight"] = 99 * mx.eye(8)
weights["lm_head.weight"] = mx.eye(8, k=-1)  # whatever came before, b follows a, c follows b, ...
FATAL = [{"prompt": ""}] + [{"prompt": "a", "temperature": 1.0, **options} for options in (
    {"stop": [1]}, {"top_k": 8}, {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"presence_penalty": 1.0, "presence_context_size": 2**32}, {"logit_bias": {2**70: 1.0}})]
def ask(port, body, timeout=20):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", "/v1/completions", json.dumps({"max_tokens": 1, **body}))
    try:
        answer = json.load(connection.getresponse())
    except (http.client.HTTPException, TimeoutError) as error:
        return type(error).__name__
    return answer.get("error") or answer["choices"][0]["text"]
with tempfile.TemporaryDirectory() as folder:
    mx.save_safetensors(f"{folder}/model.safetensors", weights)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip("abcdefg$", range(8))), merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    ports = [socket.create_server(("127.0.0.1", 0)).getsockname()[1] for _ in FATAL]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", folder, "--port"]
    servers = [subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL) for port in ports]
    try:
        for port in ports:
            while socket.socket().connect_ex(("127.0.0.1", port)): time.sleep(0.1)
        print("expected:", [ask(port, {"prompt": "b"}) for port in ports])
        _ = [ask(port, body, timeout=5) for port, body in zip(ports, FATAL)]
        print("actual:  ", [ask(port, {"prompt": "b"}, timeout=10) for port in ports])
    finally:
        for server in servers:
            server.kill()
