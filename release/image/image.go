package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Options describe an image.
type Options struct {
	// Name is the reference of the image, such as ghcr.io/trivet-csi/trivet:v0.1.0.
	Name string
	// Version is the version of the driver, and Revision its commit.
	Version, Revision string
	// Time is the time of the image and of all its files.
	Time time.Time
	// Binaries are static binaries of the driver, one for each architecture.
	Binaries [][]byte
}

// Built is the image of one architecture.
type Built struct {
	Arch   string
	Digest v1.Hash
	// Size is the sum of the sizes of its files in bytes, and Compressed the size of its layers.
	Size, Compressed int64
	image            v1.Image
}

// Result describes what Write has written.
type Result struct {
	// Digest is the digest of the index, or of the image if there is only one.
	Digest v1.Hash
	Images []Built
}

// Write assembles the images and writes them as an OCI archive: a tar archive of an OCI image layout. With
// several binaries it contains one index of all images.
func Write(ctx context.Context, path string, o Options) (*Result, error) {
	result := &Result{}
	for _, binary := range o.Binaries {
		built, err := o.build(ctx, binary)
		if err != nil {
			return nil, err
		}
		result.Images = append(result.Images, *built)
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), "oci-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if result.Digest, err = o.writeLayout(dir, result.Images); err != nil {
		return nil, err
	}
	return result, writeArchive(path, dir, o.Time)
}

// WriteRootfs writes the content of the image of one binary to a new directory.
func WriteRootfs(ctx context.Context, dir string, binary []byte, modified time.Time) error {
	content, err := build(ctx, binary)
	if err != nil {
		return err
	}
	all := maps.Clone(content.base)
	maps.Copy(all, content.driver)
	return all.writeDir(dir, modified)
}

// annotations are those of images and indexes, and the labels of images.
func (o Options) annotations() map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       "trivet",
		"org.opencontainers.image.description": "A CSI driver for storage that the nodes already have",
		"org.opencontainers.image.source":      "https://github.com/trivet-csi/trivet",
		"org.opencontainers.image.licenses":    "Apache-2.0",
		"org.opencontainers.image.version":     o.Version,
		"org.opencontainers.image.revision":    o.Revision,
		"org.opencontainers.image.created":     o.Time.UTC().Format(time.RFC3339),
	}
}

func (o Options) build(ctx context.Context, binary []byte) (*Built, error) {
	content, err := build(ctx, binary)
	if err != nil {
		return nil, err
	}
	base, err := o.layer(content.base, "the programs of Debian "+fmt.Sprint(programs))
	if err != nil {
		return nil, err
	}
	driver, err := o.layer(content.driver, binaryPath)
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image, base, driver)
	if err != nil {
		return nil, err
	}
	image, err = o.configure(image, content.arch)
	if err != nil {
		return nil, err
	}
	built := &Built{Arch: content.arch.name, Size: content.base.size() + content.driver.size(), image: image}
	for _, layer := range []mutate.Addendum{base, driver} {
		size, err := layer.Layer.Size()
		if err != nil {
			return nil, err
		}
		built.Compressed += size
	}
	built.Digest, err = image.Digest()
	return built, err
}

func (o Options) layer(t tree, createdBy string) (mutate.Addendum, error) {
	var archive bytes.Buffer
	if err := t.writeTar(&archive, o.Time); err != nil {
		return mutate.Addendum{}, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(archive.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	return mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: o.Time}, CreatedBy: createdBy}}, err
}

// configure sets how a runtime starts the driver.
func (o Options) configure(image v1.Image, arch architecture) (v1.Image, error) {
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Created = "linux", arch.name, v1.Time{Time: o.Time}
	file.Config = v1.Config{
		User:       "0:0", // mounts and loop devices need root
		Env:        []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin"},
		Entrypoint: []string{binaryPath},
		Cmd:        []string{"driver"},
		Labels:     o.annotations(),
	}
	image, err = mutate.ConfigFile(image, file)
	if err != nil {
		return nil, err
	}
	return mutate.Annotations(image, o.annotations()).(v1.Image), nil
}

// writeLayout writes an OCI image layout and returns the digest of what its index.json names.
func (o Options) writeLayout(dir string, images []Built) (v1.Hash, error) {
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return v1.Hash{}, err
	}
	// The key with which `ctr images import` and `skopeo` find the name.
	name := layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": o.Name})
	if len(images) == 1 {
		return images[0].Digest, path.AppendImage(images[0].image, name, layout.WithPlatform(images[0].platform()))
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, b := range images {
		platform := b.platform()
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: b.image, Descriptor: v1.Descriptor{Platform: &platform}})
	}
	index = mutate.Annotations(index, o.annotations()).(v1.ImageIndex)
	digest, err := index.Digest()
	return digest, errors.Join(err, path.AppendIndex(index, name))
}

func (b Built) platform() v1.Platform { return v1.Platform{OS: "linux", Architecture: b.Arch} }

// writeArchive replaces the file at path by a tar archive of a directory.
func writeArchive(path, dir string, modified time.Time) error {
	t := tree{}
	err := filepath.WalkDir(dir, func(name string, file os.DirEntry, err error) error {
		if err != nil || file.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		t["/"+slashed(dir, name)] = &entry{mode: 0o644, data: data}
		return err
	})
	if err != nil {
		return err
	}
	t.addParents()
	var archive bytes.Buffer
	if err := t.writeTar(&archive, modified); err != nil {
		return err
	}
	return writeFile(path, archive.Bytes())
}

func slashed(dir, name string) string {
	relative, err := filepath.Rel(dir, name)
	if err != nil {
		panic(err) // name is below dir
	}
	return filepath.ToSlash(relative)
}
