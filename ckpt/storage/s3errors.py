"""What an S3 store's errors mean, and what to do about each."""

from __future__ import annotations

from typing import Literal

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ChecksumError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's own, which is no OSError
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    SSOError,
    TokenRetrievalError,
    ValidationError,
)
from botocore.parsers import ResponseParserError

from ckpt.errors import (
    BadInputError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    SidestageError,
    StorageError,
)

FAILURES = (BotoCoreError, ClientError, ResponseParserError, aiohttp.ClientError, OSError)
"""What a call may raise. A TimeoutError is an OSError."""

Kind = Literal["fatal", "credentials", "denied", "throttled", "outage"]
"""`credentials`: others may do. `denied`: others may do, where these have been replaced meanwhile."""

_UNREACHED = (
    HTTPClientError,
    ConnectionError,
    IncompleteReadError,
    ChecksumError,
    FlexibleChecksumError,
    ResponseParserError,
    aiohttp.ClientError,
    OSError,
)
_NO_CREDENTIALS = (
    NoCredentialsError,
    CredentialRetrievalError,
    MetadataRetrievalError,
    TokenRetrievalError,
    SSOError,
)
# Each store has words of its own. Where it has none (Ceph tells an expired token as AccessDenied, a
# HEAD only its status), 401 and 403 are `denied`.
_EXPIRED = frozenset(
    ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "SecurityTokenExpired")
)
_UNKNOWN = frozenset(
    (
        *("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "InvalidSecurity"),  # AWS
        "InvalidTokenId",  # MinIO, of a session token
        *("AuthenticationRequired", "InvalidAuthentication"),  # Google's interface for S3 clients
        *("Unauthorized", "UnauthorizedAccess"),  # Cloudflare, Backblaze
        *("InvalidSecurityToken", "UnrecognizedClientException"),  # Alibaba, gateways of AWS
    )
)
_CLOCK = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
_THROTTLED = frozenset(
    ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests")
)
_RACES = frozenset(("ConditionalRequestConflict", "OperationAborted", "ConcurrentModification"))
_TRANSIENT = frozenset(
    ("RequestTimeout", "InternalError", "XAmzContentSHA256Mismatch", "BadDigest")
)
_FULL = frozenset(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"))
_ACTIONS = {
    "get_object": ("read", "s3:GetObject and s3:ListBucket"),
    "head_object": ("read", "s3:GetObject and s3:ListBucket"),
    "list_objects_v2": ("list", "s3:ListBucket"),
    "list_multipart_uploads": ("list unfinished uploads", "s3:ListBucketMultipartUploads"),
    "delete_object": ("delete", "s3:DeleteObject"),
    "abort_multipart_upload": ("abort an upload", "s3:AbortMultipartUpload"),
}
_WRITING = ("write", "s3:PutObject")


def code_of(e: ClientError) -> str:
    """The store's word for the error; for a HEAD request only the status, as text."""
    return str(e.response.get("Error", {}).get("Code", ""))


def status_of(e: ClientError) -> int:
    return int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def kind_of(e: BaseException) -> Kind:
    """Whether, and how, a failed call is worth another try."""
    if isinstance(e, _NO_CREDENTIALS):
        return "credentials"
    if isinstance(e, ClientError):
        code, status = code_of(e), status_of(e)
        if code in _EXPIRED or code in _UNKNOWN or code == "SignatureDoesNotMatch":
            return "credentials"
        if code in _THROTTLED or status == 429 or code in _RACES:
            return "throttled"
        if code in _FULL or code in _CLOCK or status in (501, 505, 507):
            return "fatal"
        if status in (401, 403):
            return "denied"
        return "outage" if status >= 500 or code in _TRANSIENT else "fatal"
    if isinstance(e, SSLError | ProxyConnectionError):
        return "fatal"
    return "outage" if isinstance(e, _UNREACHED) else "fatal"


def explain(e: BaseException, op: str, where: str, endpoint: str) -> SidestageError:
    """The error of ours that says the same as `e`, in one line, with what to do next.

    `op` is the call's name in boto3, `where` the URL of the object or bucket.
    """
    verb, action = _ACTIONS.get(op, _WRITING)
    can_not = f"{where}: can't {verb}"
    if isinstance(e, ClientError):
        return _refused(e, can_not, action, endpoint)
    text = " ".join(str(e).split()) or type(e).__name__
    if isinstance(e, _NO_CREDENTIALS):
        return StorageError(
            f"{can_not}: no credentials: {text}; set AWS_PROFILE, AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or give this machine a role"
        )
    if isinstance(e, PartialCredentialsError | ProfileNotFound):
        return BadInputError(f"{can_not}: {text}; correct the AWS settings")
    if isinstance(e, SSLError):
        return StorageError(
            f"{can_not}: no trusted connection to {endpoint}: {text}; for a private certificate "
            f"authority set AWS_CA_BUNDLE to its file, for a store without TLS use http://"
        )
    if isinstance(e, ChecksumError | FlexibleChecksumError):
        return CorruptError(f"{can_not}: {text}; take another copy")
    if isinstance(e, TimeoutError):
        return DeadlineError(
            f"{can_not}: no answer from {endpoint} in time; check the endpoint and the network, "
            f"then try again"
        )
    if isinstance(e, _UNREACHED):
        return StorageError(
            f"{can_not}: {endpoint} can't be reached or broke the connection: {text}; check "
            f"SIDESTAGE_S3_ENDPOINT or AWS_ENDPOINT_URL_S3 and the network, then try again"
        )
    if isinstance(e, ValidationError | ParamValidationError | ValueError):
        return BadInputError(f"{can_not}: {text}; correct the S3 settings")
    return StorageError(f"{can_not}: {type(e).__name__}: {text}; try again")


def _refused(e: ClientError, can_not: str, action: str, endpoint: str) -> SidestageError:
    code, status = code_of(e), status_of(e)
    error, meta = e.response.get("Error", {}), e.response.get("ResponseMetadata", {})
    said = f"{code}: {' '.join(str(error.get('Message', '')).split())}".strip(": ")
    if code == "NoSuchBucket":
        return NotFoundError(
            f"{can_not}: no such bucket at {endpoint}; create it, or correct the root or endpoint"
        )
    if code in ("NoSuchKey", "NoSuchVersion", "404"):
        return NotFoundError(f"{can_not}: no such object")
    if code in _EXPIRED:
        return StorageError(
            f"{can_not}: the session token has expired ({code}), and the credentials chain, asked "
            f"again, gave no newer one; renew the credentials, then try again"
        )
    if code in _UNKNOWN:
        return StorageError(
            f"{can_not}: {endpoint} doesn't know these credentials ({code}); check "
            f"AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN or the profile, and that they are this store's"
        )
    if code == "SignatureDoesNotMatch":
        return StorageError(
            f"{can_not}: {endpoint} refuses the signature ({code}); check AWS_SECRET_ACCESS_KEY, "
            f"and that no proxy changes requests"
        )
    if code in _CLOCK:
        return StorageError(f"{can_not}: {said}; set this machine's clock")
    if code in _FULL or status == 507:
        return StorageError(f"{can_not}: no room ({said}); make room or raise the quota")
    if code in ("AccessDenied", "AllAccessDisabled", "AccountProblem") or status in (401, 403):
        return StorageError(
            f"{can_not}: access denied ({said or status}); allow {action} there, see "
            f"docs/storage.md, correct the bucket, or renew credentials that worked before"
        )
    if code in (
        *(
            "PermanentRedirect",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
        ),
        *("TemporaryRedirect", "Redirect", "301", "307"),
    ):
        region = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region") or error.get("Region")
        hint = f"the bucket's is {region!r}" if region else "the bucket is in another one"
        return BadInputError(f"{can_not}: wrong region ({said}); set AWS_DEFAULT_REGION: {hint}")
    if code in ("KeyTooLongError", "InvalidBucketName", "InvalidURI", "EntityTooLarge"):
        return BadInputError(f"{can_not}: {said}; choose another root")
    if code == "InvalidObjectState":
        return StorageError(f"{can_not}: the object is archived; restore it in the store first")
    if code == "NotImplemented" or status == 501:
        return StorageError(f"{can_not}: {endpoint} doesn't implement this ({said})")
    if code in _THROTTLED:
        return StorageError(f"{can_not}: {endpoint} throttles ({said}); try again with fewer ranks")
    number = f", request {meta['RequestId']}" if meta.get("RequestId") else ""
    return StorageError(f"{can_not}: HTTP {status} {said}{number}; try again, or ask the store")
