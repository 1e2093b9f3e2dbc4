package docs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Block is a fenced code block of a page.
type Block struct {
	// Name is the page and the anchor of the heading, such as docs/snapshots.md#groups. The second block
	// of a language below the same heading has the name docs/snapshots.md#groups.2, and so on.
	Name     string
	Language string
	// File is the source file that the block quotes, relative to the root of the project. In the
	// page, it follows the language.
	File string
	Text string
}

// Read returns the blocks of README.md, of all pages below docs/, and of the page of the examples without a
// cluster, in the project at root.
func Read(root string) ([]Block, error) {
	pages := []string{"README.md", "examples/volume-manager/README.md"}
	err := fs.WalkDir(os.DirFS(root), "docs", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			pages = append(pages, path)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	var all []Block
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			return nil, err
		}
		all = append(all, blocksOf(page, string(text))...)
	}
	return all, nil
}

// Commands returns the blocks of shell commands in the project at root, by name.
func Commands(root string) (map[string]Block, error) {
	all, err := Read(root)
	commands := map[string]Block{}
	for _, b := range all {
		if b.Language == "sh" {
			commands[b.Name] = b
		}
	}
	return commands, err
}

// fence begins and ends a block.
const fence = "```"

// blocksOf returns the blocks of a page with the given text.
func blocksOf(page, text string) (blocks []Block) {
	var anchor string
	var open *Block
	numbers := map[string]int{}
	for line := range strings.Lines(text) {
		info, fenced := strings.CutPrefix(strings.TrimRight(line, "\n"), fence)
		switch {
		case fenced && open != nil:
			blocks, open = append(blocks, *open), nil
		case fenced:
			open = &Block{}
			open.Language, open.File, _ = strings.Cut(info, " ")
			open.Name = numbered(page+"#"+anchor, open.Language, numbers)
		case open != nil:
			open.Text += line
		case strings.HasPrefix(line, "#"):
			anchor = anchorOf(line)
		}
	}
	return blocks
}

// numbered returns the name of the next block of a language below the heading name. numbers contains the
// number of earlier blocks.
func numbered(name, language string, numbers map[string]int) string {
	key := name + " " + language
	if numbers[key]++; numbers[key] == 1 {
		return name
	}
	return fmt.Sprintf("%s.%d", name, numbers[key])
}

// notInAnchor matches the characters of a heading that its anchor does not contain.
var notInAnchor = regexp.MustCompile(`[^a-z0-9_ -]`)

// anchorOf returns the anchor that GitHub gives to a heading.
func anchorOf(heading string) string {
	words := strings.ToLower(strings.TrimSpace(strings.TrimLeft(heading, "#")))
	return strings.ReplaceAll(notInAnchor.ReplaceAllString(words, ""), " ", "-")
}

// Headings returns the anchors of the headings of a page. The second heading with the same text has the
// anchor TEXT-1, and so on, as on GitHub.
func Headings(text string) map[string]bool {
	anchors, times, open := map[string]bool{}, map[string]int{}, false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, fence) {
			open = !open
		}
		if open || !strings.HasPrefix(line, "#") {
			continue
		}
		anchor := anchorOf(line)
		if n := times[anchor]; n > 0 {
			anchors[fmt.Sprintf("%s-%d", anchor, n)] = true
		}
		anchors[anchor] = true
		times[anchor]++
	}
	return anchors
}
