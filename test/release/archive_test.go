package release

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"testing"
	"time"
)

// descriptor is a descriptor of the OCI image specification, with the fields that the tests read.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Platform    *platform         `json:"platform"`
	Annotations map[string]string `json:"annotations"`
}

type platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
}

// manifest is an image manifest or an index of the OCI image specification.
type manifest struct {
	Config    descriptor   `json:"config"`
	Layers    []descriptor `json:"layers"`
	Manifests []descriptor `json:"manifests"`
}

type imageConfig struct {
	Architecture string    `json:"architecture"`
	Created      time.Time `json:"created"`
	Config       struct {
		User       string            `json:"User"`
		Entrypoint []string          `json:"Entrypoint"`
		Cmd        []string          `json:"Cmd"`
		Env        []string          `json:"Env"`
		Labels     map[string]string `json:"Labels"`
	} `json:"config"`
}

// archive contains the files of an OCI archive.
type archive map[string][]byte

func readArchive(t *testing.T, file string) archive {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	a := archive{}
	for _, f := range readTar(t, bytes.NewReader(data)) {
		a[path.Clean(f.Name)] = f.data
	}
	return a
}

// read decodes a blob, and checks its digest.
func (a archive) read(t *testing.T, d descriptor, into any) {
	t.Helper()
	if err := json.Unmarshal(a.blob(t, d), into); err != nil {
		t.Fatal(err)
	}
}

func (a archive) blob(t *testing.T, d descriptor) []byte {
	t.Helper()
	var digest string
	if _, err := fmt.Sscanf(d.Digest, "sha256:%64s", &digest); err != nil {
		t.Fatalf("digest %q: %v", d.Digest, err)
	}
	data := a["blobs/sha256/"+digest]
	if got := fmt.Sprintf("%x", sha256.Sum256(data)); got != digest {
		t.Fatalf("a blob has the digest %s, want %s", got, digest)
	}
	return data
}

// index returns the descriptors in index.json.
func (a archive) index(t *testing.T) []descriptor {
	t.Helper()
	var index manifest
	if err := json.Unmarshal(a["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	return index.Manifests
}

// file is a file of a tar archive.
type file struct {
	tar.Header
	data []byte
}

func readTar(t *testing.T, r io.Reader) []file {
	t.Helper()
	var files []file
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file{*header, data})
	}
}

// image is the image of one architecture.
type image struct {
	config imageConfig
	layers [][]file
	// files contains the files of all layers by absolute path.
	files map[string]file
}

func (a archive) image(t *testing.T, d descriptor) *image {
	t.Helper()
	var m manifest
	a.read(t, d, &m)
	i := &image{files: map[string]file{}}
	a.read(t, m.Config, &i.config)
	for _, layer := range m.Layers {
		compressed, err := gzip.NewReader(bytes.NewReader(a.blob(t, layer)))
		if err != nil {
			t.Fatal(err)
		}
		files := readTar(t, compressed)
		i.layers = append(i.layers, files)
		for _, f := range files {
			i.files[path.Join("/", f.Name)] = f
		}
	}
	return i
}

// size returns the sum of the sizes of all files in bytes.
func (i *image) size() int64 {
	var size int64
	for _, f := range i.files {
		size += f.Size
	}
	return size
}

// exists reports whether the image has a file at a path, which may contain symbolic links.
func (i *image) exists(name string) bool {
	_, ok := i.resolve(name)
	return ok
}

// resolve returns a path without symbolic links, and whether the image has a file there.
func (i *image) resolve(name string) (string, bool) {
	if name == "/" {
		return name, true
	}
	dir, ok := i.resolve(path.Dir(name))
	if !ok {
		return "", false
	}
	name = path.Join(dir, path.Base(name))
	f, ok := i.files[name]
	switch {
	case !ok || f.Typeflag != tar.TypeSymlink:
		return name, ok
	case path.IsAbs(f.Linkname):
		return i.resolve(path.Clean(f.Linkname))
	default:
		return i.resolve(path.Join(dir, f.Linkname))
	}
}

// extract writes the files to a directory.
func (i *image) extract(t *testing.T, dir string) {
	t.Helper()
	for _, layer := range i.layers {
		for _, f := range layer {
			at := filepath.Join(dir, f.Name)
			var err error
			switch f.Typeflag {
			case tar.TypeDir:
				err = os.MkdirAll(at, 0o755)
			case tar.TypeSymlink:
				err = os.Symlink(f.Linkname, at)
			default:
				err = os.WriteFile(at, f.data, f.FileInfo().Mode())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}
