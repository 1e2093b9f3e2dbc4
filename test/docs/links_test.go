package docs_test

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/test/docs"
)

var (
	link = regexp.MustCompile(`\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"`)
	// mention matches the name of a page, as in comments, errors and URLs.
	mention = regexp.MustCompile(`\bdocs/[a-z/-]+\.(?:md|svg)(?:#[a-z0-9_-]+)?`)
	scheme  = regexp.MustCompile(`^[a-z]+:`)
)

// TestLinks checks that each link of a Markdown file to a file of the repository names an existing file and
// heading, and so does each name of a page in any other file.
func TestLinks(t *testing.T) {
	found := 0
	for _, file := range textFiles(t) {
		text := read(t, file)
		if strings.HasSuffix(file, ".md") {
			for _, match := range link.FindAllStringSubmatch(withoutBlocks(text), -1) {
				target := match[1] + match[2]
				if scheme.MatchString(target) {
					continue
				}
				found++
				name, anchor, _ := strings.Cut(target, "#")
				checkTarget(t, file, path.Join(path.Dir(file), name), name == "", anchor)
			}
			continue
		}
		for _, target := range mention.FindAllString(text, -1) {
			found++
			name, anchor, _ := strings.Cut(target, "#")
			checkTarget(t, file, name, false, anchor)
		}
	}
	if found < 300 {
		t.Errorf("got %d links, want at least 300: the pattern does not match them any more", found)
	}
}

// checkTarget fails if a file of the repository, or a heading in it, does not exist.
func checkTarget(t *testing.T, from, name string, same bool, anchor string) {
	t.Helper()
	if same {
		name = from
	}
	if _, err := os.Stat(filepath.Join(root, name)); err != nil {
		t.Errorf("%s links to %s, which does not exist", from, name)
		return
	}
	if anchor != "" && strings.HasSuffix(name, ".md") && !docs.Headings(read(t, name))[anchor] {
		t.Errorf("%s links to %s#%s, but the page has no such heading", from, name, anchor)
	}
}

// withoutBlocks removes the fenced blocks and the quoted code of a page.
func withoutBlocks(text string) string {
	var kept strings.Builder
	for i, part := range strings.Split(text, "```") {
		if i%2 == 0 {
			kept.WriteString(quoted.ReplaceAllString(part, ""))
		}
	}
	return kept.String()
}

// checkedFiles are the endings of the names of files that may name a page.
var checkedFiles = []string{".md", ".go", ".yaml", ".tpl", ".json", ".sh", ".html", ".toml", ".txt"}

// textFiles returns the names of the files that may name a page, relative to the root of the project.
func textFiles(t *testing.T) (files []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(name, ".git") || name == "bin" || name == "out" || name == "dist"):
			return fs.SkipDir
		case d.Type().IsRegular() && (slices.Contains(checkedFiles, path.Ext(name)) || d.Name() == "Makefile"):
			files = append(files, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var (
	pageLists = regexp.MustCompile(`pages = \[([^\]]*)\]`)
	pageName  = regexp.MustCompile(`"([^"]+)"`)
)

// TestSitePages checks that the navigation of the site has each page of docs/, and no others. It shows folders
// as a whole.
func TestSitePages(t *testing.T) {
	listed := map[string]bool{}
	for _, list := range pageLists.FindAllStringSubmatch(read(t, "site/hugo.toml"), -1) {
		for _, name := range pageName.FindAllStringSubmatch(list[1], -1) {
			listed["docs/"+name[1]+".md"] = true
		}
	}
	for _, file := range textFiles(t) {
		if path.Dir(file) == "docs" && path.Ext(file) == ".md" && file != "docs/README.md" && !listed[file] {
			t.Errorf("the navigation in site/hugo.toml lacks %s", file)
		}
	}
	for name := range listed {
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			t.Errorf("site/hugo.toml lists %s, which does not exist", name)
		}
	}
}
