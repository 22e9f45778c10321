"""What requests and answers look like, for the API page. A test checks them against the schemas."""

from typing import Any

HEALTH = {
    "batches": 12, "collapses": 0, "rollbacks": 0, "drifted_snapshots": 0, "concentrated": 0, "periodic_resets": 0,
    "skipped_updates": 0, "non_finite_answers": 0, "non_finite_losses": 0, "non_finite_gradients": 0,
    "non_finite_weights": 0,
}  # fmt: skip
ALARM = {
    "kind": "attack", "since": 1795060391.2, "batch": 11,
    "words": "Attack suspected: 11 of the last 24 images are suspicious",
}  # fmt: skip
STREAM: dict[str, Any] = {
    "name": "gate-7", "owner": "anna", "created": 1795060327.9, "last": 1795060455.9, "batches": 12, "images": 24,
    "frozen": False, "health": HEALTH, "accuracy": 91.7, "labelled": 24, "suspicious": 0.458, "abstained": 11,
    "alarms": [ALARM], "state": "hot",
}  # fmt: skip
REPORT: dict[str, Any] = {
    "stream": "gate-7", "number": 12, "time": 1795060455.9, "images": 2, "adapted": True, "noted": True,
    "seconds": 0.12, "reliability": [0.37, 0.54, 0.35], "dropped": 2,
    "views": [
        "original",
        "gaussian_noise → fft_low_pass → sharpness → flip",
        "gaussian_noise → gaussian_blur → shear_y → flip",
    ],
    "suspicion": {"mean": 0.505, "median": 0.03, "histogram": [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]}, "abstained": 1,
    "shares": [0.5, 0.0, 0.5], "accuracy": None, "alarm": "", "alarms": [ALARM],
    "suspicious": 0.458, "health": HEALTH,
}  # fmt: skip
ANSWER: dict[str, Any] = {
    "stream": "gate-7", "number": 12, "labels": [0, 2], "classes": ["dog", "horse"],
    "probabilities": [[0.91, 0.06, 0.03], [0.12, 0.07, 0.81]], "suspicion": [0.03, 0.98], "abstain": [False, True],
    "weights": [[0.472, 0.004], [0.264, 0.498], [0.264, 0.498]], "adapted": True, "noted": True,
    "model": "40623f41a4f66433", "report": REPORT,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "version": "40623f41a4f66433", "method": "tent", "predictor": "safer-g", "norm": None,
    "classes": ["dog", "cat", "horse"], "side": 64, "resize": "stretch bilinear", "views": 5, "abstain": 0.5,
    "state_bytes": 22348, "limits": {"images": 256, "pixels": 16_000_000, "body_bytes": 67_108_864},
    "rollout": False,
}  # fmt: skip
ROLLOUT: dict[str, Any] = {
    "live": {"version": "40623f41a4f66433", "model": "old.safetensors", "since": 1795060327.9},
    "shadow": {"version": "b1c53e9d7a1f0c62", "model": "new.safetensors", "since": 1795146727.9},
    "waiting": 0,
    "counts": {
        "batches": 100, "images": 6400, "missed": 2, "failed": 0, "same": 6016, "labelled": 640,
        "live_flagged": 96, "live_right": 512, "live_seconds": 12.0,
        "shadow_flagged": 64, "shadow_right": 544, "shadow_seconds": 13.0,
    },
    "agreement": 0.94, "flagged": {"live": 0.015, "shadow": 0.01}, "accuracy": {"live": 80.0, "shadow": 85.0},
    "seconds": {"live": 0.12, "shadow": 0.13},
}  # fmt: skip
EVENT: dict[str, Any] = {"time": 1795060327.9, "owner": "anna", "stream": "gate-7", "what": "created"}
REQUEST_ID = "9f2c4e1ab07d3358"
# An error of each status; docs/serve.md says when they come.
ERRORS = {
    "400": "the body ended before it was complete; send the request again",
    "401": "the token is missing or unknown; expected the header Authorization: Bearer TOKEN",
    "403": "the request comes from a page of another site; expected the service's own",
    "404": "there is no stream 'gate-7'; POST /v1/streams creates one",
    "408": "1048576 bytes of the body arrived in 36 s; expected all of it within 20 s and then at least 65536 bytes/s. "
    "Send smaller batches",
    "409": "a stream 'gate-7' exists already; choose a new name",
    "413": "the batch has 300 images; expected at most 256. Send several batches",
    "415": "the type of the body is text/plain; expected multipart/form-data with images, or application/x-npy",
    "422": "label 9 is out of range; expected 0 to 6",
    "429": "the queue of the service is full; try again in 2 s",
    "503": "the service is stopping; try again later",
    "507": "there is no room for another stream; delete some that are no longer used",
}
NOT_READY = {
    "error": "the service does not accept batches: the service is stopping",
    "reasons": {"engine": "the service is stopping"},
    "request_id": REQUEST_ID,
}
