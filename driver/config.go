package driver

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// defaultMaxVolumes is the number of volumes one node takes where the
// configuration does not say.
const defaultMaxVolumes = 4096

// Config is the configuration file.
type Config struct {
	Pools []pool.Config `yaml:"pools"`
	// MaxVolumesPerNode bounds how many volumes are published to the node.
	MaxVolumesPerNode int `yaml:"maxVolumesPerNode"`
	// Pprof serves Go's profiles at /debug/pprof/.
	Pprof bool `yaml:"pprof"`
	// Kubernetes is nil where no kubelet runs the driver.
	Kubernetes *Kubernetes `yaml:"kubernetes"`
}

// Kubernetes is what the driver knows of the kubelet that runs it.
type Kubernetes struct {
	// KubeletDir is the kubelet's directory, at the same path as on the node.
	KubeletDir string `yaml:"kubeletDir"`
	// StartupTaint: the node's startup taint is removed when the driver is
	// registered.
	StartupTaint bool `yaml:"startupTaint"`
}

const defaultKubeletDir = "/var/lib/kubelet"

// LoadConfig reads the configuration file. An empty path, or one that is only
// the default and not there, gives one directory pool below the state directory.
func LoadConfig(path string, optional bool, stateDir string) (Config, error) {
	b, err := os.ReadFile(path)
	if path == "" || (optional && errors.Is(err, os.ErrNotExist)) {
		return Config{
			Pools:             []pool.Config{{Name: "default", Directory: pool.Directory{Path: filepath.Join(stateDir, "pools", "default")}}},
			MaxVolumesPerNode: defaultMaxVolumes,
		}, nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("configuration: %w", err)
	}
	c, err := ParseConfig(b)
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// ParseConfig reads a configuration strictly. Errors (ErrInvalid) name line and
// key.
func ParseConfig(b []byte) (Config, error) {
	c := Config{MaxVolumesPerNode: defaultMaxVolumes}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return Config{}, volume.Errorf(volume.ErrInvalid, "%s", plainYAMLError(err))
	}
	if c.Kubernetes != nil && c.Kubernetes.KubeletDir == "" {
		c.Kubernetes.KubeletDir = defaultKubeletDir
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return Config{}, volume.Errorf(volume.ErrInvalid, "%s", plainYAMLError(err))
	}
	return c, c.validate(&doc)
}

func (c Config) validate(doc *yaml.Node) error {
	if len(c.Pools) == 0 {
		return volume.Errorf(volume.ErrInvalid, "pools: at least one is needed")
	}
	if c.MaxVolumesPerNode < 1 {
		return volume.Errorf(volume.ErrInvalid, "line %d: maxVolumesPerNode %d: want 1 or more", lineOf(doc, "maxVolumesPerNode"), c.MaxVolumesPerNode)
	}
	if k := c.Kubernetes; k != nil && !filepath.IsAbs(k.KubeletDir) {
		return volume.Errorf(volume.ErrInvalid, "line %d: kubernetes.kubeletDir %q: want an absolute path", lineOf(doc, "kubernetes", "kubeletDir"), k.KubeletDir)
	}
	names, paths := map[string]bool{}, map[string]bool{}
	for i, p := range c.Pools {
		if key, err := p.Validate(); err != nil {
			return fmt.Errorf("line %d: pools[%d].%w", lineOf(doc, "pools", i, key), i, err)
		}
		if names[p.Name] {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].name %q: another pool has that name", lineOf(doc, "pools", i, "name"), i, p.Name)
		}
		path := filepath.Clean(p.Directory.Path)
		if paths[path] {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].directory.path %q: another pool has that path", lineOf(doc, "pools", i, "directory"), i, path)
		}
		names[p.Name], paths[path] = true, true
	}
	return nil
}

// lineOf finds the line of what a path of keys and indices leads to, or of the
// last on the way that is there.
func lineOf(doc *yaml.Node, path ...any) int {
	if len(doc.Content) == 0 {
		return 0
	}
	at := doc.Content[0]
	for _, step := range path {
		next := child(at, step)
		if next == nil {
			break
		}
		at = next
	}
	return at.Line
}

// child is the value of a mapping's key, or a sequence's item; nil if there is none.
func child(at *yaml.Node, step any) *yaml.Node {
	if i, ok := step.(int); ok {
		if at.Kind == yaml.SequenceNode && i < len(at.Content) {
			return at.Content[i]
		}
		return nil
	}
	for i := 0; at.Kind == yaml.MappingNode && i+1 < len(at.Content); i += 2 {
		if at.Content[i].Value == step {
			return at.Content[i+1]
		}
	}
	return nil
}

var goType = regexp.MustCompile(` (in|not found in) type \S+`)

// plainYAMLError drops Go's names from an error of the decoder.
func plainYAMLError(err error) string {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	text = strings.TrimPrefix(text, "unmarshal errors:\n")
	text = goType.ReplaceAllString(text, " is not a key here")
	return strings.Join(strings.Fields(text), " ")
}
