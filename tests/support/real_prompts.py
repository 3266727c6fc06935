"""Twenty prompts of 1 to 600 tokens for the embedded model: prose, code, lists, other scripts, emoji."""

STORY = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or "
    "conversations in it, and what is the use of a book, thought Alice, without pictures or conversations? So "
    "she was considering in her own mind, as well as she could, for the hot day made her feel very sleepy and "
    "stupid, whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking "
    "the daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very "
    "remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself, "
    "Oh dear! Oh dear! I shall be late! But when the Rabbit actually took a watch out of its waistcoat-pocket, "
    "and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that she "
    "had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning "
    "with curiosity, she ran across the field after it, and fortunately was just in time to see it pop down a "
    "large rabbit-hole under the hedge. In another moment down went Alice after it, never once considering how "
    "in the world she was to get out again. "
)
CODE = '''def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def is_prime(n: int) -> bool:
'''
QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

TEXTS = [
    "The",
    "Hello",
    "Once upon a time",
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "La nuit était claire et le vent",
    "日本の首都は",
    "Emoji: 😀 👩‍👩‍👧 🎉",
    "E = mc^2 is",
    CODE,
    QUESTION.format("What is gravity?"),
    QUESTION.format("Write a haiku about the sea."),
    QUESTION.format("List three fruits, separated by commas."),
    "<html>\n<head>\n<title>",
    STORY[:200],
    STORY[:500],
    STORY[300:900],
    STORY,
    STORY + "Chapter II. " + STORY[:400],
    STORY + CODE + STORY,
]


def prompts(tokenizer) -> list[list[int]]:
    """Return the prompts as token ids; the shortest has 1 token, the longest 600."""
    ids = [tokenizer.encode(text) for text in TEXTS]
    ids[-1] = ids[-1][:600]
    return ids
