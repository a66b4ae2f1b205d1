"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.masks._bytes import (
    TextMismatchError as TextMismatchError,
    TokenBytes as TokenBytes,
)
from torchrl_llm_kl.masks._conversation import (
    RenderedConversation as RenderedConversation,
    render_conversation as render_conversation,
    render_conversations as render_conversations,
)
from torchrl_llm_kl.masks._messages import (
    AssistantMaskError as AssistantMaskError,
    EmptyAssistantMaskError as EmptyAssistantMaskError,
    MissingChatTemplateError as MissingChatTemplateError,
    TurnNotFoundError as TurnNotFoundError,
    history_to_messages as history_to_messages,
)
from torchrl_llm_kl.masks._template import (
    PLAIN_TEMPLATE as PLAIN_TEMPLATE,
)
from torchrl_llm_kl.masks._tokens import (
    mask_from_prompt_lengths as mask_from_prompt_lengths,
)
from torchrl_llm_kl.masks._translate import (
    PromptTranslator as PromptTranslator,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.masks._bytes import (
    BYTE_TOKEN as BYTE_TOKEN,
    Chunk as Chunk,
    byte_alphabet as byte_alphabet,
    chunks as chunks,
    pair_specials as pair_specials,
)
from torchrl_llm_kl.masks._lost import (
    LostText as LostText,
)
from torchrl_llm_kl.masks._messages import (
    ASSISTANT as ASSISTANT,
    Message as Message,
    TemplateArgs as TemplateArgs,
    Tokenizer as Tokenizer,
)
from torchrl_llm_kl.masks._prepared import (
    call_id as call_id,
    call_message as call_message,
    prepare_messages as prepare_messages,
)
from torchrl_llm_kl.masks._template import (
    template_variables as template_variables,
)
from torchrl_llm_kl.masks._tokens import (
    encode_images as encode_images,
    encode_with_mask as encode_with_mask,
    is_processor as is_processor,
    split_images as split_images,
)
