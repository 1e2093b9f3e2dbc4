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
}

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
		return volume.Errorf(volume.ErrInvalid, "line %d: maxVolumesPerNode %d: want 1 or more", lineOf(doc, -1, "maxVolumesPerNode"), c.MaxVolumesPerNode)
	}
	names, paths := map[string]bool{}, map[string]bool{}
	for i, p := range c.Pools {
		if key, err := p.Validate(); err != nil {
			return fmt.Errorf("line %d: pools[%d].%w", lineOf(doc, i, key), i, err)
		}
		if names[p.Name] {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].name %q: another pool has that name", lineOf(doc, i, "name"), i, p.Name)
		}
		path := filepath.Clean(p.Directory.Path)
		if paths[path] {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].directory.path %q: another pool has that path", lineOf(doc, i, "directory"), i, path)
		}
		names[p.Name], paths[path] = true, true
	}
	return nil
}

// lineOf finds the line of a key: of the i-th pool, or at the top for i < 0.
func lineOf(doc *yaml.Node, i int, key string) int {
	if len(doc.Content) == 0 {
		return 0
	}
	at := doc.Content[0]
	if i >= 0 {
		if pools := child(at, "pools"); pools != nil && i < len(pools.Content) {
			at = pools.Content[i]
		}
	}
	if found := child(at, key); found != nil {
		return found.Line
	}
	return at.Line
}

func child(mapping *yaml.Node, key string) *yaml.Node {
	if mapping.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return mapping.Content[i+1]
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
