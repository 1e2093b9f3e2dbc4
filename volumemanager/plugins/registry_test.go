package plugins_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// fakePlugin supports volumes whose names begin with the plugin's name.
type fakePlugin struct {
	plugins.VolumePlugin
	name string
}

func (p fakePlugin) Name() string { return p.name }
func (p fakePlugin) CanSupport(spec *plugins.Spec) bool {
	return strings.HasPrefix(spec.Name(), p.name)
}

// fakeFamily has a member for each name of the form <family>/<member>.
type fakeFamily struct{ fakePlugin }

func (f fakeFamily) Of(spec *plugins.Spec) plugins.VolumePlugin { return fakePlugin{name: spec.Name()} }

func (f fakeFamily) Named(name string) plugins.VolumePlugin {
	if !strings.HasPrefix(name, f.name+"/") {
		return nil
	}
	return fakePlugin{name: name}
}

func (f fakeFamily) Members() ([]plugins.VolumePlugin, error) {
	return []plugins.VolumePlugin{fakePlugin{name: f.name + "/one"}, fakePlugin{name: f.name + "/two"}}, errMember
}

var errMember = errors.New("a record cannot be read")

// TestRegistry: a registry returns the only plugin for a spec or a name. If the plugin is a family, it
// returns the member.
func TestRegistry(t *testing.T) {
	r := plugins.Registry{fakePlugin{name: "a"}, fakeFamily{fakePlugin{name: "flex"}}, fakePlugin{name: "ab"}}
	// bySpec and byName are the names of the plugins, or parts of the errors.
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
	if len(all) != 4 || all[2].Name() != "flex/two" || !errors.Is(err, errMember) {
		t.Errorf("All: got %v, %v; want a, flex/one, flex/two and ab, and %v", all, err, errMember)
	}
}

// check fails the test unless want is the name of the plugin or, if there is an error, a part of the error.
func check(t *testing.T, what, want string, p plugins.VolumePlugin, err error) {
	t.Helper()
	if err != nil && !strings.Contains(err.Error(), want) || err == nil && p.Name() != want {
		t.Errorf("%s: got %v, %v; want %s", what, p, err, want)
	}
}
