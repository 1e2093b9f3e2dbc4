package plugins_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// kind is a plugin of volumes whose names begin with its own.
type kind struct {
	plugins.VolumePlugin
	name string
}

func (k kind) Name() string                       { return k.name }
func (k kind) CanSupport(spec *plugins.Spec) bool { return strings.HasPrefix(spec.Name(), k.name) }

// family has a member for each name with its own before a slash.
type family struct{ kind }

func (f family) Of(spec *plugins.Spec) plugins.VolumePlugin { return kind{name: spec.Name()} }

func (f family) Named(name string) plugins.VolumePlugin {
	if !strings.HasPrefix(name, f.name+"/") {
		return nil
	}
	return kind{name: name}
}

func (f family) Members() ([]plugins.VolumePlugin, error) {
	return []plugins.VolumePlugin{kind{name: f.name + "/one"}, kind{name: f.name + "/two"}}, errUnread
}

var errUnread = errors.New("one could not be read")

// TestRegistry: one plugin is for a spec or a name; of a family it is the member.
func TestRegistry(t *testing.T) {
	r := plugins.Registry{kind{name: "a"}, family{kind{name: "flex"}}, kind{name: "ab"}}
	for _, tc := range []struct{ name, bySpec, byName string }{
		{"a", "a", "a"},
		{"ab", "two plugins, a and ab", "ab"},
		{"flex/x", "flex/x", "flex/x"},
		{"flex", "flex", plugins.ErrNoPlugin.Error()},
		{"other", plugins.ErrNoPlugin.Error(), plugins.ErrNoPlugin.Error()},
	} {
		p, err := r.ForSpec(&plugins.Spec{Volume: &corev1.Volume{Name: tc.name}})
		check(t, "volume "+tc.name, tc.bySpec, p, err)
		p, err = r.ByName(tc.name)
		check(t, "plugin "+tc.name, tc.byName, p, err)
	}
	all, err := r.All()
	if len(all) != 4 || all[2].Name() != "flex/two" || !errors.Is(err, errUnread) {
		t.Errorf("%v, %v", all, err)
	}
}

func check(t *testing.T, what, want string, p plugins.VolumePlugin, err error) {
	t.Helper()
	if err != nil && !strings.Contains(err.Error(), want) || err == nil && p.Name() != want {
		t.Errorf("%s: %v, %v; want %s", what, p, err, want)
	}
}
