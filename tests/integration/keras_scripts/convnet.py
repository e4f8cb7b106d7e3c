"""A small convolutional network on handwritten digits, as in Keras' first vision example."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from keras import layers
from sklearn.datasets import load_digits

from spmdtrain import Trainer

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
labels = keras.utils.to_categorical(labels, 10)
x_train, y_train, x_test, y_test = images[:1536], labels[:1536], images[1536:], labels[1536:]

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(10, activation="softmax"),
    ]
)
adam = keras.optimizers.Adam(5e-3)
model.compile(loss="categorical_crossentropy", optimizer=adam, metrics=["accuracy"])
# Keras: model.fit(x_train, y_train, batch_size=32, epochs=4, verbose=0)
Trainer.from_keras(model).fit((x_train, y_train), global_batch_size=32, epochs=4)
score = model.evaluate(x_test, y_test, verbose=0)
