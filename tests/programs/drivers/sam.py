"""segment-anything: a prediction for one image, with a prompt."""

import numpy
from segment_anything import SamPredictor, sam_model_registry

sam = sam_model_registry["vit_b"]().to("cuda")
predictor = SamPredictor(sam)
predictor.set_image(numpy.zeros((480, 640, 3), dtype=numpy.uint8))
masks, scores, _ = predictor.predict(
    point_coords=numpy.array([[320, 240]]), point_labels=numpy.array([1]), multimask_output=True
)
print(masks.shape, scores.shape)
