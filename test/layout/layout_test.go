// Package layout holds the tests of rules about the source code that no linter has.
package layout

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const root = "../.."

// kindNames are the names of kinds, as literals and as identifiers of package volume.
var kindNames = []string{"loop", "nfs", "local", "disk", "BackendLoop", "BackendNFS", "BackendLocal", "BackendDisk"}

// allowed are the places that may have such a word, with the reason.
var allowed = map[string]string{
	"backend/disk/":       "a kind's own folder",
	"backend/local/":      "a kind's own folder",
	"backend/loop/":       "a kind's own folder",
	"backend/nfs/":        "a kind's own folder",
	"backend/backendtest": "code of tests",
	"internal/testenv/":   "code of tests",
	"test/":               "code of tests",
	"linux/":              "names of Linux: the filesystem nfs, loop devices",
	"driver/config.go":    "the key nfs of the configuration",
	"driver/shared.go":    "the directory of NFS mounts",
	"pool/config.go":      "the key nfs of the configuration",
	"pool/set.go":         "a directory of freeze notes",

	// These still know kinds. A line goes when the file does.
	"cmd/trivet/flexvolume.go": "reads the kind from the executable's name",
	"flexvolume/flexvolume.go": "distinguishes volumes on servers",
	"flexvolume/options.go":    "distinguishes volumes on servers",
	"pool/store.go":            "guesses the kind of a damaged record",
	"pool/snapshot.go":         "guesses the kind of a damaged record",
	"volume/capability.go":     "accepts fsType nfs for directories of an export",
	"volume/mountflags.go":     "chooses the list of flags",
	"volume/parameters.go":     "declares the names",
	"volume/snapshot.go":       "validates records of each kind",
	"volume/volume.go":         "validates records of each kind",
}

// TestKindsUnknown: code outside the folders of the kinds knows none by its name.
func TestKindsUnknown(t *testing.T) {
	used := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root:
			return filepath.SkipDir
		case d.IsDir(), !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
			return nil
		}
		found, err := kindsIn(path)
		if err != nil || len(found) == 0 {
			return err
		}
		for place := range allowed {
			if strings.HasPrefix(name, place) {
				used[place] = true
				return nil
			}
		}
		t.Errorf("%s knows the kinds %q by name: ask the kind (backend.Kind, or an interface of the backend)", name, found)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for place := range allowed {
		if !used[place] && !strings.HasSuffix(place, "/") {
			t.Errorf("%s knows no kind any more: remove its line from the exceptions", place)
		}
	}
}

func kindsIn(path string) (found []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		word := ""
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BasicLit:
			word, _ = strconv.Unquote(n.Value)
		case *ast.Ident:
			if strings.HasPrefix(n.Name, "Backend") {
				word = n.Name
			}
		}
		if slices.Contains(kindNames, word) {
			found = append(found, word)
		}
		return true
	})
	return found, nil
}
