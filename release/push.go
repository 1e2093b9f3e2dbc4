package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// push pushes the image or the index of an OCI archive to a registry, and prints the digests. The credentials are those of docker and helm.
func push(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return errors.New(usage)
	}
	archive, reference := args[0], args[1]
	target, err := name.NewTag(reference, name.StrictValidation)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "push-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := extract(archive, dir); err != nil {
		return fmt.Errorf("%s: %w", archive, err)
	}
	top, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return err
	}
	content, err := top.IndexManifest()
	if err != nil {
		return err
	}
	if len(content.Manifests) != 1 {
		return fmt.Errorf("%s has %d images or indexes, want one", archive, len(content.Manifests))
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	found := content.Manifests[0]
	if !found.MediaType.IsIndex() {
		image, err := top.Image(found.Digest)
		if err != nil {
			return err
		}
		fmt.Println(found.Platform, found.Digest)
		return remote.Write(target, image, options...)
	}
	index, err := top.ImageIndex(found.Digest)
	if err != nil {
		return err
	}
	fmt.Println("index", found.Digest)
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, image := range manifest.Manifests {
		fmt.Println(image.Platform, image.Digest)
	}
	return remote.WriteIndex(target, index, options...)
}

// extract unpacks a tar archive of regular files and directories.
func extract(archive, dir string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for entries := tar.NewReader(f); ; {
		header, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag == tar.TypeDir {
			err = root.MkdirAll(path.Clean(header.Name), 0o700)
		} else {
			err = writeEntry(root, header.Name, entries)
		}
		if err != nil {
			return err
		}
	}
}

func writeEntry(root *os.Root, name string, content io.Reader) error {
	f, err := root.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Close())
}
