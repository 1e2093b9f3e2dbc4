// Package layout contains tests of rules about the source code that no linter checks.
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

// kindNames are the names of the kinds of volume.
var kindNames = []string{"loop", "nfs", "local", "disk", "lvm"}

// allowedNames contains the prefixes of paths whose files may contain one of kindNames as a string
// literal, with the reason.
var allowedNames = map[string]string{
	"backend/disk/":        "a kind's own folder",
	"backend/local/":       "a kind's own folder",
	"backend/loop/":        "a kind's own folder",
	"backend/lvm/":         "a kind's own folder",
	"backend/nfs/":         "a kind's own folder",
	"backend/backendtest":  "code of tests",
	"internal/testenv/":    "code of tests",
	"test/":                "code of tests",
	"linux/":               "names of Linux: the filesystem nfs, loop devices, the program lvm",
	"driver/config.go":     "the key nfs of the configuration",
	"driver/shared.go":     "the directory of NFS mounts",
	"pool/config.go":       "the key nfs of the configuration",
	"pool/set.go":          "a directory of freeze notes",
	"volume/manifest.go":   "the value local of the parameter copies",
	"volume/mountflags.go": "names of Linux: the filesystem nfs",
}

// allowedFields contains the prefixes of paths whose files may use the field Directory of a record,
// or assert the type of a record's section, with the reason.
var allowedFields = map[string]string{
	"backend/disk/":                "a kind's own folder",
	"backend/local/":               "a kind's own folder",
	"backend/loop/":                "a kind's own folder",
	"backend/lvm/":                 "a kind's own folder",
	"backend/nfs/":                 "a kind's own folder",
	"backend/backendtest":          "code of tests",
	"backend/directory.go":         "what the kinds whose volumes are directories share",
	"cluster/status/report.go":     "shows the path of a directory",
	"controllerserver/create.go":   "a directory has no device to expand",
	"controllerserver/metadata.go": "a directory has no blocks",
	"doctor/pools.go":              "reports the limits of directories",
	"test/":                        "code of tests",
	"pool/":                        "stores directories and limits them",
	"volume/":                      "declares the field",
}

// TestKindNames checks that only the code of a kind contains the kind's name.
func TestKindNames(t *testing.T) {
	searchIn(t, allowedNames, namesIn, "names of kinds")
}

// TestKindData checks that only the code of a kind uses the part of a record that depends on the
// kind.
func TestKindData(t *testing.T) {
	searchIn(t, allowedFields, fieldsIn, "the data of a kind")
}

// searchIn fails for each file in which search finds anything, unless its path begins with a key of
// allowed. It also fails for keys that are not needed.
func searchIn(t *testing.T, allowed map[string]string, search func(*ast.File) []string, what string) {
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
		t.Errorf("%s uses %s: %q: use a field of backend.Kind or an interface of the backend instead", name, what, found)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for place := range allowed {
		if !used[place] && !strings.HasSuffix(place, "/") {
			t.Errorf("%s does not use %s: remove it from the exceptions", place, what)
		}
	}
}

// namesIn returns the string literals of a file that are names of kinds.
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

// fieldsIn returns the uses of a field Directory, and the type assertions of a field Section, in a
// file. It ignores Directory.Path, because only the Directory of a pool's configuration has a Path.
func fieldsIn(file *ast.File) (found []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if n.Sel.Name == "Path" && selects(n.X, "Directory") {
				return false
			}
			if name, ok := n.X.(*ast.Ident); selects(n, "Directory") && (!ok || !importsAs(file, name.Name)) {
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

// selects reports whether an expression selects a field or method with a name.
func selects(n ast.Expr, field string) bool {
	s, ok := n.(*ast.SelectorExpr)
	return ok && s.Sel.Name == field
}

// importsAs reports whether a file imports a package with a name.
func importsAs(file *ast.File, name string) bool {
	return slices.ContainsFunc(file.Imports, func(i *ast.ImportSpec) bool { return strings.HasSuffix(i.Path.Value, "/"+name+`"`) })
}
