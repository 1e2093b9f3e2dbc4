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

// kindNames are the names of kinds.
var kindNames = []string{"loop", "nfs", "local", "disk"}

// naming are the places that may have such a name as a literal, with the reason.
var naming = map[string]string{
	"backend/disk/":        "a kind's own folder",
	"backend/local/":       "a kind's own folder",
	"backend/loop/":        "a kind's own folder",
	"backend/nfs/":         "a kind's own folder",
	"backend/backendtest":  "code of tests",
	"internal/testenv/":    "code of tests",
	"test/":                "code of tests",
	"linux/":               "names of Linux: the filesystem nfs, loop devices",
	"driver/config.go":     "the key nfs of the configuration",
	"driver/shared.go":     "the directory of NFS mounts",
	"pool/config.go":       "the key nfs of the configuration",
	"pool/set.go":          "a directory of freeze notes",
	"volume/mountflags.go": "names of Linux: the filesystem nfs",
}

// opening are the places that may use the field Directory of a record or the section of a
// record as one kind has it, with the reason.
var opening = map[string]string{
	"backend/disk/":                "a kind's own folder",
	"backend/local/":               "a kind's own folder",
	"backend/loop/":                "a kind's own folder",
	"backend/nfs/":                 "a kind's own folder",
	"backend/backendtest":          "code of tests",
	"backend/directory.go":         "what kinds of directories have in common",
	"cmd/trivet/volumes.go":        "shows where a directory is",
	"controllerserver/create.go":   "a directory has no device to expand",
	"controllerserver/metadata.go": "a directory has no blocks",
	"doctor/pools.go":              "reports the limits of directories",
	"test/":                        "code of tests",
	"pool/":                        "contains directories, and limits them",
	"volume/":                      "declares the field",
}

// TestKindsUnknown: code outside the folders of the kinds knows none by its name.
func TestKindsUnknown(t *testing.T) {
	searchIn(t, naming, namesIn, "knows kinds by name")
}

// TestSectionsClosed: code outside the folders of the kinds does not use their own data.
func TestSectionsClosed(t *testing.T) {
	searchIn(t, opening, fieldsIn, "uses the data of a kind")
}

// searchIn fails for files in which search finds anything, unless they are in allowed.
func searchIn(t *testing.T, allowed map[string]string, search func(*ast.File) []string, is string) {
	t.Helper()
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
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		found := search(file)
		if len(found) == 0 {
			return nil
		}
		for place := range allowed {
			if strings.HasPrefix(name, place) {
				used[place] = true
				return nil
			}
		}
		t.Errorf("%s %s: %q: ask the kind (backend.Kind, or an interface of the backend)", name, is, found)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for place := range allowed {
		if !used[place] && !strings.HasSuffix(place, "/") {
			t.Errorf("nothing in %s %s: remove its line from the exceptions", place, is)
		}
	}
}

// namesIn are the names of kinds that are literals of a file.
func namesIn(file *ast.File) (found []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok {
			if word, _ := strconv.Unquote(literal.Value); slices.Contains(kindNames, word) {
				found = append(found, word)
			}
		}
		_, imports := n.(*ast.ImportSpec)
		return !imports
	})
	return found
}

// fieldsIn are the fields Directory, and type assertions of sections, in a file. A pool's
// configuration has a Directory too, with the one field Path.
func fieldsIn(file *ast.File) (found []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if n.Sel.Name == "Path" && selects(n.X, "Directory") {
				return false
			}
			if of, ok := n.X.(*ast.Ident); selects(n, "Directory") && (!ok || !importsAs(file, of.Name)) {
				found = append(found, n.Sel.Name)
			}
		case *ast.TypeAssertExpr:
			if selects(n.X, "Section") {
				found = append(found, "a type of Section")
			}
		}
		return true
	})
	return found
}

func selects(n ast.Expr, field string) bool {
	s, ok := n.(*ast.SelectorExpr)
	return ok && s.Sel.Name == field
}

// importsAs tells whether a file imports a package of that name.
func importsAs(file *ast.File, name string) bool {
	return slices.ContainsFunc(file.Imports, func(i *ast.ImportSpec) bool { return strings.HasSuffix(i.Path.Value, "/"+name+`"`) })
}
