"""Text that mlx_lm.server holds back is lost when EOS ends the answer, while its ids are served."""
import http.client, json, pathlib, socket, subprocess, sys, tempfile, time
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SAYS = "0a\u0120$1b\u00e2$2cx$"  # prompt, answer, EOS: a space, a byte of a character, half a stop
VOCAB = {token: i for i, token in enumerate(dict.fromkeys(SAYS + "y"))}
SERVE = """import os, sys, threading; from mlx_lm import server
threading.Thread(target=server.main).start(); sys.stdin.read(); os._exit(0)"""  # it ends with us
config = dict(
    model_type="llama", hidden_size=(n := len(VOCAB)), intermediate_size=n, num_hidden_layers=1,
    vocab_size=n, num_attention_heads=1, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=False,
)
weights = {name: 0 * old for name, old in tree_flatten(Model(ModelArgs(**config)).parameters())}
weights |= {"model.norm.weight": mx.ones(n), "model.embed_tokens.weight": mx.eye(n)}
for token, follower in zip(SAYS, SAYS[1:]):
    weights["lm_head.weight"][VOCAB[follower], VOCAB[token]] = 1
tokenizer, texts = Tokenizer(models.BPE(vocab=VOCAB, merges=[])), []
tokenizer.decoder = decoders.ByteLevel()
with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
    mx.save_safetensors(f"{folder}/model.safetensors", weights)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    port = probe.getsockname()[1]
    probe.close()
    command = [sys.executable, "-c", SERVE, "--model", folder, "--port", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        for prompt in "012":
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = json.dumps({"prompt": prompt, "logprobs": True, "stop": ["xy"]})
            connection.request("POST", "/v1/completions", body)
            choice = json.load(connection.getresponse())["choices"][0]
            ids = [token["id"] for token in choice["logprobs"]["content"][:-1]]  # the last is EOS
            texts.append((tokenizer.decode(ids), choice["text"]))
print("expected: {!a}\nactual:   {!a}".format(*zip(*texts)))
