#!/usr/bin/env bash
# A tour of ckpt on a bundled checkpoint: what a newcomer types first. `make demo` runs it; nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fixture=fixtures/deepspeed/accelerate_fsdp2
source=$fixture/ckpt
out=build/demo

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then bold=$'\e[1m' cyan=$'\e[36m' plain=$'\e[0m'; else bold='' cyan='' plain=''; fi

# Prints a heading with its number.
step=0
say() {
    step=$((step + 1))
    printf '\n%s%d. %s%s\n' "$bold" "$step" "$1" "$plain"
}

# Prints the command as one would type it, then runs it.
run() {
    local word line='$'
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=+,-]+$ ]] || word="'$word'"
        line+=" $word"
    done
    printf '%s%s%s\n' "$cyan" "$line" "$plain"
    "$@"
}

rm -rf "$out"
mkdir -p "$out"
printf '%s\n' "A real checkpoint: a tiny Llama with its AdamW state, saved by accelerate with PyTorch FSDP2 on 4 ranks." \
    "No GPU, no torch, no pickle executed from here on. Everything new goes into $out."

say "What is in it?"
run ckpt inspect "$source"

say "Is it whole? Every chunk is read, every checksum compared."
run ckpt verify "$source" --full

say "Train on with another mesh: 4 FSDP ranks become TP 2 x PP 2 x DP 2, on 8 ranks."
run ckpt reshard "$source" "$out/tp2-pp2-dp2" --tp 2 --pp 2 --dp 2

say "Check the new one as strictly as the old one."
run ckpt verify "$out/tp2-pp2-dp2" --full

say "Old and new hold the same values, bit for bit, though no file is the same."
run ckpt diff "$source" "$out/tp2-pp2-dp2"

say "The judge: the tensors that PyTorch itself gathered when it saved, under names of their own."
run ckpt diff "$out/tp2-pp2-dp2" "$fixture/truth.safetensors" --exclude '*.step' \
    --map-names 're:^model\.(.*)=>param/\1' \
    --map-names 're:^optimizer\.state\.(.*)\.(exp_avg|exp_avg_sq)$=>\2/\1'

say "One file for inference."
run ckpt export "$out/tp2-pp2-dp2" "$out/safetensors" --to safetensors

say "A corner of one tensor: only these bytes are read."
run ckpt cat "$out/safetensors" 'lm_head.weight[0:2, 0:6]'

printf '\n%sDone.%s Look around in %s, or try: ckpt --help\n' "$bold" "$plain" "$out"
