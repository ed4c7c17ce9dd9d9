"""Texts on which tokenizers differ: what Unicode has of blanks, marks, joiners and numerals, and what people type."""

from __future__ import annotations

import random
from collections.abc import Iterable

BLANKS = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u2060"
    "\u3000\ufeff"
)
CONTROLS = "".join(map(chr, [*range(32), 0x7F, *range(0x80, 0xA0), 0xAD, 0x200E, 0x202E, 0xFFF9, 0xE0001]))
NUMERALS = "0123456789٣۴०๕Ⅷ½²₃①㊷〇༳𝟘𝟗𐄇🄂🯵"
MARKS = "e\u0301\u0327a\u0300\u0301\u0302\u0303n\u0303\u20dd\u0e34\u093f\u05b0\u064b\ufe0f\U000e0100"
# Unassigned, assigned lately, for private use, and what is no character at all.
UNKNOWN = (
    "\u0378\u0b50\U0003fffd\U0001fae8\U0001fadf\U00010d40\U0002ebf0\ue000\uf8ff\U000f0000\U0010fffd\ufffe\uffff\ufdd0"
)
SCRIPTS = (
    "你好，世界。漢字カタカナひらがな한국어 조선말",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "مرحبا بالعالم، ١٢٣ ـــ لا إله",
    "नमस्ते दुनिया क्ष त्र ज्ञ ०१२",
    "שלום עולם",
    "Привет, мир! Ёлка",
    "Ελληνικά ΣΊΣΥΦΟΣ ς",
    "İstanbul ıI ſ ß ẞ ﬁ Ǆ",
    "ᚠᚢᚦ 𓀀𓂀 𐍈 𝒜𝓑",
    "မြန်မာ ខ្មែរ ལྷ་ས ᠮᠣᠩᠭᠣᠯ",
)
EMOJI = "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ❤️ 0️⃣ #️⃣ 🧑🏿‍🚀 \u200d\u200d \U0001f3fb"
TYPED = (
    *("", " ", "  ", "\n", "\r\n", " a", "a ", "  a  ", "\n\na\n\n", "\x00", "a\x00b \x00 \x04! \x06a\x13b"),
    *("a\r\nb\rc\n\rd\n\n\ne", "a \n b \t\n\t c", "\u2028a\u2029b", "```py\n    x = 1\n\n\n```"),
    *("it's IT'S It’s we'Ll WE'LL 'S'T'RE'VE'M'LL'D 'ſ 'twas ''s s''", "don't'd've I'm_not", "...?!?!…—–‐"),
    *("1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 1e-9 10½ x² H₂O", "a_b-c.d,e;f:g!h?i"),
    *("<think>\n\n</think>\n\n", "<think>\n", "<|im_end|>", "a<|im_start|>user\nhi<|im_end|>\n<|endoftext|>"),
    *("<|endoftext|><|endoftext|>", "<s></s>[INST] <0x0A> ▁", "Ġ Ċ ĉ č Ń", "CamelCaseSNAKE_caseABCdef"),
    *("https://example.com/a?b=c&d=%20#e", '{"a": [1, null, true], "b": "\\u00e9\\n"}'),
)


def texts(names: Iterable[str] = ()) -> list[str]:
    """The torture set; `names` are a tokenizer's added tokens, which get into it in many surroundings."""
    pools = [BLANKS, CONTROLS, NUMERALS, MARKS, UNKNOWN, EMOJI, *SCRIPTS, "aZ'!_ \n09"]
    found = [*TYPED, *pools]
    for pool in (BLANKS, CONTROLS, NUMERALS, MARKS, UNKNOWN):
        for letter in pool:
            found += [letter, f"a{letter}b", f" {letter} ", f"1{letter}{letter}2", f"é{letter}\n", f"!{letter}漢"]
    found += [letter * count for letter in "a A1 \n\t.-é漢🏽\u0301\x00\u200d" for count in (2, 3, 9, 500)]
    for name in names:
        found += [name, f"a{name}b", f" {name} ", f"\n{name}{name}\n", name[1:], name[:-1], name.upper()]
    rng = random.Random(1)
    for _ in range(400):
        some = rng.sample(pools, 3)
        found.append("".join(rng.choice(rng.choice(some)) for _ in range(rng.randint(2, 40))))
    return found
